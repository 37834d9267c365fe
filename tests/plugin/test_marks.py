"""`throughput_floor` marks of a user's own tests: none is passed over, each is compared with what it names."""

from __future__ import annotations

import textwrap

import pytest

LOADS = """
loads:
  small: {concurrency: 2, input: 16, output: 32, windows: 3}
  other: {concurrency: 1, input: 16, output: 8, windows: 3}
"""
# One stream gets so few tokens a second that the client's own overhead is small beside it.
STEADY = "- {when: {}, then: {tokens-per-second: 400}}"


@pytest.fixture
def run(project):
    """Run one file of tests in the small matrix, with its two loads."""
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + LOADS)

    def run_(text: str, *args: str, rules: str = STEADY, **more):
        project.file("test_mine.py", "import pytest\nfloor = pytest.mark.throughput_floor\n" + textwrap.dedent(text))
        return project.run(*(args or ("test_mine.py", "-rs")), rules=rules, **more)

    return run_


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ('at_least=1, load="smal"', "no matrix has a load 'smal'; did you mean 'small'?"),
        ("at_least=1, load=3", "wants the name of a load, not 3"),
        ('ratio=1, of={"nosuch": "x"}', "no matrix has an axis 'nosuch'"),
        ('ratio=1, of={"attention": "flashinfe"}', "no matrix has a level 'flashinfe' of attention; did you mean"),
        ("ratio=1, of={}", 'of={"axis": "level"}'),
        ('at_least=float("nan")', "wants a number above 0 for at_least, not nan"),
        ('ratio=float("inf"), of="baseline"', "wants a number above 0 for ratio, not inf"),
    ],
)
def test_a_mark_that_can_never_hold_is_an_error_at_collection(run, mark, told) -> None:
    result = run(f"@floor('output_throughput', {mark})\ndef test_it(load): load('small')\n")
    assert result.code == 2
    assert "ERROR collecting test_mine.py" in result.text
    assert told in result.text


def test_a_mark_for_one_load_on_a_test_without_loads_is_an_error_too(run) -> None:
    result = run("@floor('output_throughput', at_least=1, load='small')\ndef test_it(sglang_server): pass\n")
    assert result.code == 2
    assert "about the fixture `load`, which this test does not use" in result.text


def test_a_parameters_wrong_mark_is_that_tests_error(run) -> None:
    result = run(
        """
        @pytest.mark.parametrize("name", ["other", pytest.param("small", marks=floor("speed", at_least=1))])
        def test_it(load, name):
            load(name)
        """,
        "test_mine.py",
        "-k",
        "baseline",
    )
    assert result.run.parseoutcomes() == {"passed": 1, "errors": 1, "deselected": 4}
    assert "wants one of output_throughput" in result.text


def test_a_mark_whose_load_the_test_never_runs_fails_it(run) -> None:
    result = run(
        """
        @pytest.mark.throughput_floor("output_throughput", at_least=1, load="other")
        def test_it(load):
            load("small")

        @floor("output_throughput", at_least=1, load="other")
        class TestBoth:
            def test_other(self, load): load("other")
            def test_small(self, load): load("small")
        """,
        "test_mine.py",
        "-k",
        "baseline",
    )
    assert {name: outcome for (_, name), outcome in result.checks.items()} == {
        "test_it": "failed",
        "test_other": "passed",
        "test_small": "passed",
    }
    (check,) = [one for one in result.record["checks"] if one["name"] == "test_it"]
    assert "test_mine.py:4 is about load 'other', and the test ran small" in check["failure"]["message"]


def test_a_test_that_skips_or_fails_by_itself_is_not_asked_for_loads(run) -> None:
    result = run(
        """
        @floor("output_throughput", at_least=1)
        def test_skips_itself(load): pytest.skip("not today")

        @floor("output_throughput", at_least=1)
        def test_fails_before(load): assert 1 == 2

        @floor("output_throughput", at_least=1)
        def test_runs_none(load): pass
        """,
        "test_mine.py",
        "-k",
        "baseline",
    )
    assert result.run.parseoutcomes() == {"failed": 2, "skipped": 1, "deselected": 6}
    messages = {one["name"]: (one["failure"] or {}).get("message", "") for one in result.record["checks"]}
    assert messages["test_skips_itself"] == ""
    assert messages["test_fails_before"].startswith("AssertionError: assert 1 == 2")
    assert "ran no load()" in messages["test_runs_none"]


IN_FLASHINFER = """
@pytest.mark.gpu_cells(attention="flashinfer")
@floor("output_throughput", ratio=0.7, of={"attention": "triton", "graphs": "off"}%s)
def test_ratio(load):
    load("small")

@pytest.mark.gpu_cells(graphs="off")
def test_there(load):
    load("small")
"""


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_what_a_mark_compares_with_runs_before_and_is_waited_for(project, run, args) -> None:
    """The file of the matrix names flashinfer before graphs off."""
    project.speeds(800)
    result = run(IN_FLASHINFER % "", "test_mine.py", *args)
    assert result.code == 0, result.text
    assert list(result.cells) == ["graphs.off", "attention.flashinfer"]
    rows = {row["metric"]: row for row in result.cells["attention.flashinfer"]["measurements"]}
    assert rows["output_throughput"]["verdict"] == "ok"
    assert "× sm120-m-graphs.off" in rows["output_throughput"]["floor"]["text"]
    assert result.cells["attention.flashinfer"]["gpus"] == result.cells["graphs.off"]["gpus"]


def test_the_built_in_check_measures_what_a_mark_names(project, run) -> None:
    project.speeds(800)
    words = ("gpuserve/suite.py::test_throughput", "test_mine.py", "-rs", "-k")
    result = run(IN_FLASHINFER % ', load="small"', *words, "not there")
    assert result.checks == {
        ("graphs.off", "throughput"): "passed",
        ("attention.flashinfer", "test_ratio"): "passed",
    }, result.text
    # Nobody asks any more: nothing is measured for nobody.
    result = run(IN_FLASHINFER % ', load="small"', *words, "not ratio")
    assert result.checks == {("graphs.off", "test_there"): "passed"}


@pytest.mark.parametrize(
    ("of", "cells", "told"),
    [
        (
            '"baseline"',
            'attention="flashinfer"',
            "nothing in this run measures small in sm120-m-baseline: let this test",
        ),
        ('{"graphs": "off"}', 'attention="flashinfer"', "this run has no such cell: an include of the matrix makes it"),
        ('{"graphs": "off"}', 'attention="triton"', "sm120-m-graphs.off runs after this cell, as all cells do after"),
    ],
    ids=["not selected", "no such cell", "baseline"],
)
def test_without_a_reference_the_next_step_is_told(run, of, cells, told) -> None:
    """A baseline that waited for a delta would keep both waiting."""
    result = run(
        f"""
        @pytest.mark.gpu_cells({cells})
        @floor("output_throughput", ratio=0.7, of={of}, load="small")
        def test_ratio(load):
            load("small")
        """
    )
    skipped = {name for (name, _), outcome in result.checks.items() if outcome == "skipped"}
    assert len(skipped) == 1, result.text
    assert told in result.text
    if "nothing" in told:
        assert "or add gpuserve/suite.py::test_throughput to the command line" in result.text


def test_a_check_that_runs_there_is_not_told_as_the_next_step(project, run) -> None:
    """What it lacks is the name of the load, in the mark."""
    file = project.path / "matrices" / "tiny.yaml"
    floor = "{when: {}, load: other, output_throughput: {at-least: 1, unit: tok/s}}"
    file.write_text(f"{file.read_text()}floors: [{floor}]\n")
    result = run(IN_FLASHINFER % "", "gpuserve/suite.py::test_throughput", "test_mine.py", "-rs", "-k", "not there")
    assert result.checks["attention.flashinfer", "test_ratio"] == "skipped", result.text
    assert 'let this test run there, or write load="small" in the mark' in result.text
    assert "to the command line" not in result.text


def test_what_cannot_be_decided_hides_no_later_failure_and_skips_at_the_end(project, run) -> None:
    project.speeds(90)
    result = run(
        """
        @floor("output_throughput", at_least=100, load="small")
        @floor("output_throughput", at_least=100_000, load="other")
        def test_slow(load):
            load("small")
            load("other")

        @floor("output_throughput", at_least=100)
        def test_asserts(load):
            load("small")
            assert 1 == 2

        @floor("output_throughput", at_least=100)
        def test_open(load):
            load("small")
            load("other")
        """,
        "test_mine.py",
        "-rs",
        "-k",
        "baseline",
    )
    failures = {one["name"]: (one["failure"] or {}).get("kind") for one in result.record["checks"]}
    assert failures == {"test_slow": "slow", "test_asserts": "assertion", "test_open": None}
    assert result.checks["baseline", "test_open"] == "skipped"
    # A server is never exchanged under a test: what to do is told.
    result.run.stdout.fnmatch_lines(["SKIPPED*test_mine.py:*inconclusive: small:*"])
    assert "in a test of your own the server is not started again" in result.text
    (check,) = [one for one in result.record["checks"] if one["name"] == "test_open"]
    assert "inconclusive: other:" in check["reason"]


STRANGER = """
import os
from pathlib import Path
from pytest_gpuserve.gpu import sim
from pytest_gpuserve.manager import measuring

real = measuring.Measuring._loaded

def beside_a_stranger(self, handle, *more):
    folder = Path(self._plan.probes["sm120"]["dir"])
    sim.charge(folder, handle.gpus[0].uuid, os.getpid(), 1 << 30)
    try:
        return real(self, handle, *more)
    finally:
        sim.charge(folder, handle.gpus[0].uuid, os.getpid(), 0)

measuring.Measuring._loaded = beside_a_stranger
"""


def test_disturbed_figures_end_the_test_before_it_asserts_anything_about_them(project, run) -> None:
    project.file("conftest.py", STRANGER)
    result = run(
        "def test_it(load): assert load('small')['output_throughput'].median > 1e9", "-k", "baseline", "test_mine.py"
    )
    assert result.checks == {("baseline", "test_it"): "skipped"}, result.text


def test_a_floor_names_its_own_line(run) -> None:
    result = run(
        """
        pytestmark = [
            pytest.mark.throughput_floor("output_throughput", at_least=1_000_000),
            pytest.mark.throughput_floor("total_throughput", at_least=1_000_000),
        ]

        @pytest.mark.throughput_floor("request_throughput", at_least=1_000_000)
        class TestX:
            @pytest.mark.gpu_cells(graphs="on")
            @pytest.mark.throughput_floor("p99_ttft_ms",
                                          at_most=0.0001)
            @pytest.mark.throughput_floor("p99_itl_ms", at_most=0.0001)
            def test_x(self, load):
                load("small")

        @pytest.mark.throughput_floor("p99_itl_ms", at_most=1_000_000)
        @pytest.mark.parametrize("n", [pytest.param(1, marks=floor("mean_itl_ms", at_most=0.0001))])
        def test_y(load, n):
            load("small")
        """,
        "test_mine.py",
        "-k",
        "baseline",
    )
    messages = {one["name"]: one["failure"]["message"] for one in result.record["checks"]}
    where = {
        line.split(":")[1].split()[0]: line.rpartition("(")[2].rstrip(")") for line in messages["test_x"].splitlines()
    }
    assert where == {
        "output_throughput": "test_mine.py:5",
        "total_throughput": "test_mine.py:6",
        "request_throughput": "test_mine.py:9",
        "p99_ttft_ms": "test_mine.py:12",
        "p99_itl_ms": "test_mine.py:14",
    }
    # What the source does not show is the test's: here the line of its `def`.
    assert "mean_itl_ms" in messages["test_y[1]"]
    assert "(test_mine.py:20)" in messages["test_y[1]"]


MARKED = (
    "@floor('output_throughput', at_least=1_000_000)\ndef test_it(load): assert load('small')['mean_ttft_ms'].median"
)


def test_a_simulation_without_speeds_judges_no_mark_and_says_so(project, run) -> None:
    run(MARKED, "--collect-only", "test_mine.py")
    result = project.pytester.runpytest_subprocess(
        "-p",
        "no:cacheprovider",
        "--gpu-matrix",
        "tiny",
        "--gpu-sim",
        "1xsm120",
        "-rs",
        "-k",
        "baseline",
        "test_mine.py",
    )
    assert result.parseoutcomes() == {"skipped": 1, "deselected": 2}
    result.stdout.fnmatch_lines(["SKIPPED*one made-up speed for all cells; --gpu-sim-scenario FILE gives them speeds"])


def test_with_floors_off_a_users_load_still_runs_and_is_not_judged(run) -> None:
    result = run(MARKED, "--gpu-floors", "off", "-k", "baseline", "test_mine.py")
    assert result.checks == {("baseline", "test_it"): "passed"}, result.text
    assert {row["verdict"] for row in result.cells["baseline"]["measurements"]} == {"recorded"}
