"""Speed and output in whole runs, simulated: what is slow is `slow`, noise is not, and wrong output is neither."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

LOADS = """
loads:
  small: {concurrency: 2, input: 16, output: 32, windows: 3}
"""
RATIO = """
  - when: {attention: flashinfer}
    load: small
    output_throughput: {at-least-ratio: 0.7, of: baseline}
"""
# One stream gets so few tokens a second that the client's own overhead is small beside it.
STEADY = "{when: {}, then: {tokens-per-second: 400}}"


def floors(project, text: str = RATIO) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + LOADS + "floors:" + text)


def rules(*more: str) -> str:
    return "\n".join(f"- {rule}" for rule in (STEADY, *more))


def rows(cell: dict) -> dict[str, dict]:
    return {row["metric"]: row for row in cell["measurements"]}


@pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_fast_path_that_is_8_times_slower_is_slow(project, args) -> None:
    floors(project)
    slow = "{when: {attention: flashinfer}, then: {slow: 8}}"
    result = project.run(*args, "-k", "baseline or flashinfer", rules=rules(slow))
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "failed"}, result.text
    failure = result.cells["attention.flashinfer"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("slow", "serving")
    assert "at-least 0.7 × sm120-m-baseline" in failure["message"]
    assert "tiny.yaml:20" in failure["message"]
    # Missed by another floor, or after more starts, it is as slow as before.
    assert failure["signature"].startswith("small: output_throughput below its floor #")
    row = rows(result.cells["attention.flashinfer"])["output_throughput"]
    assert (row["verdict"], row["unit"], len(row["samples"])) == ("below-floor", "tok/s", 3)
    assert row["median"] == pytest.approx(100, rel=0.3)
    assert row["floor"]["where"].endswith("tiny.yaml:20")
    baseline = result.cells["baseline"]
    assert rows(baseline)["output_throughput"]["verdict"] == "recorded"
    assert rows(baseline)["median_ttft_ms"]["direction"] == "lower"
    gpu = next(iter(baseline["telemetry"]["small"]["gpus"].values()))
    assert gpu["text"].endswith("W of 600 W")
    assert ("graphs.off", "throughput") not in result.checks


def test_a_slow_server_is_told_with_what_its_log_says_of_itself(project) -> None:
    floors(project)
    slow = "{when: {attention: flashinfer}, then: {slow: 8, fallback: triton}}"
    result = project.run("-k", "throughput and (baseline or flashinfer)", rules=rules(slow))
    failure = result.cells["attention.flashinfer"]["failure"]
    assert failure["kind"] == "slow"
    assert "the server's log says, which may be why: attention backend replaced by triton" in failure["message"]
    assert failure["signature"].startswith("small: output_throughput below its floor #")


def test_a_reference_that_is_no_baseline_is_measured_before_on_the_same_gpus(project) -> None:
    floors(
        project,
        """
  - when: {attention: flashinfer, graphs: on}
    load: small
    output_throughput: {at-least-ratio: 0.7, of: {attention: triton, graphs: off}}
""",
    )
    project.speeds(800)
    # The file names flashinfer before graphs off.
    result = project.run("-n", "2", rules=rules())
    assert result.code == 0, result.text
    row = rows(result.cells["attention.flashinfer"])["output_throughput"]
    assert row["verdict"] == "ok"
    assert "at-least 0.7 × sm120-m-graphs.off" in row["floor"]["text"]
    assert row["floor"]["note"] == ""
    assert result.cells["attention.flashinfer"]["gpus"] == result.cells["graphs.off"]["gpus"]


def test_a_known_bad_entry_can_expect_it(project) -> None:
    floors(project)
    project.file(
        "matrices/known_bad.yaml",
        """
        schema: 1
        entries:
          - id: KB-1
            when: {flag.attention-backend: flashinfer}
            expect: {kind: slow}
            mode: xfail
            confidence: confirmed
            source: test
            grade: S
            issue: https://github.com/sgl-project/sglang/issues/1
            reason: it is slow
            added: 2026-11-01
            review-by: 2036-11-01
        """,
    )
    slow = "{when: {attention: flashinfer}, then: {slow: 8}}"
    result = project.run("-k", "baseline or flashinfer", rules=rules(slow))
    assert (result.code, result.outcomes["attention.flashinfer"]) == (0, "xfailed"), result.text


def test_a_grey_result_starts_the_server_again_and_then_decides(project) -> None:
    """A tenth too slow: one start decides nothing, three of the same do, against three of the baseline."""
    floors(project, RATIO.replace("0.7", "1.0"))
    project.speeds(100, 90, noise=(1, 0.99, 1.01))
    result = project.run("-k", "baseline or flashinfer", rules=rules())
    cell = result.cells["attention.flashinfer"]
    assert cell["failure"]["kind"] == "slow", result.text
    assert cell["server_starts"] == 5
    assert len(rows(cell)["output_throughput"]["samples"]) == 9
    assert cell["telemetry"]["small"]["starts"] == 3
    assert cell["telemetry"]["small"]["beside"] == {"sm120-m-baseline": 2}
    # The checks behind it run against the last of the three.
    assert result.checks["attention.flashinfer", "clean-shutdown"] == "passed"


FLOOR_100 = """
  - when: {attention: triton, graphs: on}
    load: small
    output_throughput: {at-least: 100, unit: tok/s}
"""
NEVER_ENDS = """
import threading
decided = measuring.Measured.undecided
measuring.Measured.undecided = property(lambda one: threading.Event().wait() if one.starts[1:] else decided.fget(one))
"""


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_further_starts_do_not_count_against_the_tests_own_limit(project, method: str) -> None:
    """Two more starts of three seconds each under a limit of four: none of them is the test's time."""
    floors(project, FLOOR_100)
    project.speeds(90)
    limit = ("--timeout=4", f"--timeout-method={method}")
    result = project.run(*limit, "-k", "baseline and throughput", rules=rules("{then: {phase-seconds: 0.5}}"))
    assert result.checks == {("baseline", "throughput"): "failed"}, result.text + result.errors
    cell = result.cells["baseline"]
    assert (cell["failure"]["kind"], cell["server_starts"]) == ("slow", 3)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_the_limit_holds_anew_after_a_further_start(project, method: str) -> None:
    floors(project, FLOOR_100)
    project.speeds(90, more=NEVER_ENDS)
    limit = ("--timeout=4", f"--timeout-method={method}")
    result = project.run(*limit, "-k", "baseline and throughput", rules=rules())
    assert result.code == 1
    assert "Timeout" in result.text + result.errors
    assert (result.folder / "cells/sm120-m-baseline/server-2.log").exists()


def test_a_dip_of_3_percent_under_10_percent_noise_is_inconclusive_and_visible(project) -> None:
    floors(project, FLOOR_100)
    project.path.joinpath("matrices/tiny.yaml").write_text(
        project.path.joinpath("matrices/tiny.yaml").read_text().replace("windows: 3", "windows: 5")
    )
    project.speeds(100, noise=(0.97, 0.87, 1.07, 0.90, 1.04))
    result = project.run("-k", "baseline", "-rs", rules=rules())
    assert result.code == 0
    assert result.checks["baseline", "throughput"] == "skipped"
    assert result.outcomes == {"baseline": "passed"}
    assert result.cells["baseline"]["server_starts"] == 1  # two more starts would not decide it either
    row = rows(result.cells["baseline"])["output_throughput"]
    assert row["verdict"] == "inconclusive"
    assert "more windows would decide" in row["note"]
    result.run.stdout.fnmatch_lines(["SKIPPED*inconclusive: small: output_throughput is 97*more windows would decide*"])


STRANGER = """
import os
from pathlib import Path
from pytest_gpuserve.gpu import sim
from pytest_gpuserve.manager import measuring

real = measuring.Measuring._loaded

def beside_a_stranger(self, handle, profile):
    folder = Path(self._plan.probes["sm120"]["dir"])
    sim.charge(folder, handle.gpus[0].uuid, os.getpid(), 1 << 30)
    try:
        return real(self, handle, profile)
    finally:
        sim.charge(folder, handle.gpus[0].uuid, os.getpid(), 0)

measuring.Measuring._loaded = beside_a_stranger
"""


def test_a_strangers_process_on_the_gpu_makes_a_slow_load_invalid_and_not_slow(project) -> None:
    floors(project)
    project.file("conftest.py", STRANGER)
    slow = "{when: {attention: flashinfer}, then: {slow: 8}}"
    result = project.run("-k", "baseline or flashinfer", "-rs", rules=rules(slow))
    assert result.outcomes == {"baseline": "passed", "attention.flashinfer": "passed"}, result.text
    assert result.checks["attention.flashinfer", "throughput"] == "skipped"
    row = rows(result.cells["baseline"])["output_throughput"]
    assert row["verdict"] == "invalid"
    assert "which is none of this server's, used GPU" in row["note"]
    # The reference is invalid as well, and that is what is said.
    result.run.stdout.fnmatch_lines(["SKIPPED*the measurement of sm120-m-baseline is invalid*"])


@pytest.mark.parametrize(
    ("behaviour", "kind", "check", "told"),
    [
        ("output: short", "wrong-output", "throughput", "16 of 32 tokens"),
        ("output: nan", "wrong-output", "output", "NaN"),
        ("output: repeat", "wrong-output", "output", "token 0 over and over: '!!!!"),
        ("output: garbage", "wrong-output", "output", "too far apart"),
        ("output: empty", "wrong-output", "output", "1 of 32 tokens"),
        ("fallback: triton", "fallback", "backend", "--attention-backend asked for flashinfer, the server uses triton"),
    ],
)
def test_each_fault_has_its_kind_and_none_is_speed(project, behaviour, kind, check, told) -> None:
    floors(project)
    fault = f"{{when: {{attention: flashinfer}}, then: {{{behaviour}, tokens-per-second: 5000}}}}"
    result = project.run("-k", "baseline or flashinfer", "--gpu-no-control", rules=rules(fault))
    assert result.outcomes["baseline"] == "passed", result.text
    assert result.checks["attention.flashinfer", check] == "failed"
    found = {one["name"]: one["failure"] for one in result.record["checks"] if one["failure"]}
    assert found[check]["kind"] == kind
    assert told in found[check]["message"]
    if behaviour == "output: short":
        assert result.cells["attention.flashinfer"]["measurements"] == []
    if behaviour == "output: garbage":
        folder = result.folder / result.cells["attention.flashinfer"]["folder"]
        (evidence,) = [name for name in found[check]["evidence"] if name.endswith(".txt")]
        assert "sm120-m-baseline" in (folder / evidence).read_text()


def test_a_sound_backend_is_close_to_the_baseline_and_the_record_says_how_close(project) -> None:
    result = project.run("-k", "baseline or flashinfer")
    assert result.code == 0, result.text
    baseline, delta = result.cells["baseline"]["output"], result.cells["attention.flashinfer"]["output"]
    assert baseline["compared_with"] == "itself"
    assert {part["mean"] for part in baseline["parts"].values()} == {0}
    assert delta["compared_with"] == "sm120-m-baseline"
    assert all(0 < part["mean"] < part["mean_limit"] for part in delta["parts"].values())
    assert delta["cached_tokens"] == 4 * 192
    assert delta["long_context"] > 10_000


def test_dummy_weights_are_said_to_be_unchecked(project) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text().replace("gpus: 1}", "gpus: 1, flags: {load-format: dummy}}"))
    result = project.run("-k", "baseline", "-rs")
    assert result.checks["baseline", "output"] == "skipped"
    result.run.stdout.fnmatch_lines(["SKIPPED*output not checked*"])


def test_without_floors_or_without_a_scenario_there_is_no_throughput_check(project) -> None:
    result = project.run("-k", "baseline")
    assert ("baseline", "throughput") not in result.checks
    assert "deselected" in result.text
    floors(project)
    result = project.run("-k", "flashinfer", "--gpu-floors", "off")
    assert ("attention.flashinfer", "throughput") not in result.checks


def test_a_reference_that_is_not_there_is_said_and_not_passed_over(project) -> None:
    floors(project)
    result = project.run("-k", "flashinfer", "-rs", rules=rules())
    assert result.code == 0
    assert result.checks["attention.flashinfer", "throughput"] == "skipped"
    result.run.stdout.fnmatch_lines(["SKIPPED*sm120-m-baseline has no result in this session*"])


def test_recorded_floors_are_a_patch_that_git_applies_and_the_next_run_meets(project) -> None:
    floors(project)
    matrix = project.path / "matrices" / "tiny.yaml"
    matrix.write_text(matrix.read_text().replace("windows: 3", "windows: 5"))
    project.speeds(800, noise=(1, 0.99, 1.01, 0.98, 1.02))
    subprocess.run(["git", "init", "-q", project.path], check=True)
    result = project.run("-k", "baseline", "--gpu-floors", "record", rules=rules())
    assert result.code == 0, result.text
    assert rows(result.cells["baseline"])["output_throughput"]["verdict"] == "recorded"
    assert "floors proposed for matrices/tiny.yaml" in result.text
    subprocess.run(["git", "apply", str(result.folder / "floors.patch")], cwd=project.path, check=True)
    assert "SIMULATED, " in matrix.read_text()
    result = project.run("-k", "baseline", rules=rules())
    assert result.checks["baseline", "throughput"] == "passed", result.text
    assert rows(result.cells["baseline"])["output_throughput"]["verdict"] == "ok"


def test_floors_relative_to_history_wait_for_a_history(project) -> None:
    floors(
        project,
        """
  - when: {attention: triton, graphs: on}
    load: small
    output_throughput: {at-least-of-history: 0.8, last: 3}
""",
    )
    project.speeds(800)
    result = project.run("-k", "baseline", "-rs", rules=rules())
    assert result.checks["baseline", "throughput"] == "skipped"
    assert "no history: 0 records" in result.text
    project.speeds(760)
    result = project.run("-k", "baseline", rules=rules())
    assert result.checks["baseline", "throughput"] == "passed", result.text
    project.speeds(260)
    result = project.run("-k", "baseline", rules=rules())
    assert result.cells["baseline"]["failure"]["kind"] == "slow"
    assert "of the median of the last 3 runs" in result.cells["baseline"]["failure"]["message"]


MINE = """
import pytest

def test_measures(sglang_server, load):
    found = load("small", windows=2)
    assert found["output_throughput"].median > 100
    assert len(found["median_ttft_ms"].samples) == 2

@pytest.mark.throughput_floor("output_throughput", at_least=100)
@pytest.mark.throughput_floor("output_throughput", ratio=0.8, of="baseline")
@pytest.mark.throughput_floor("p99_ttft_ms", at_most=5000, load="small")
def test_marked(load):
    load("small")

@pytest.mark.throughput_floor("output_throughput", at_least=100_000)
def test_too_slow(load):
    load("small")
"""


def test_a_users_own_tests_measure_and_are_judged(project) -> None:
    floors(project)
    project.speeds(800)
    project.file("test_mine.py", textwrap.dedent(MINE))
    result = project.run("test_mine.py", "-k", "baseline or flashinfer", rules=rules())
    for cell in ("baseline", "attention.flashinfer"):
        assert result.checks[cell, "test_measures"] == "passed", result.text
        assert result.checks[cell, "test_marked"] == "passed", result.text
        assert result.checks[cell, "test_too_slow"] == "failed"
        assert result.cells[cell]["failure"]["kind"] == "slow"
        assert "test_mine.py:15" in result.cells[cell]["failure"]["message"]
        loads = {row["load"] for row in result.cells[cell]["measurements"]}
        assert loads == {"small", "small[windows=2]"}


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ('"speed", at_least=3', "wants one of output_throughput"),
        ('"output_throughput", at_most=3', "takes exactly one of at_least and ratio"),
        ('"p99_ttft_ms", at_least=3', "takes exactly one of at_most and ratio"),
        ('"output_throughput", ratio=1.2', "with ratio, and only with it"),
        ('"output_throughput", at_least="fast"', "wants a number above 0"),
        ('"output_throughput", least=3', "knows no keyword least"),
        ('"output_throughput", at_least=3', "ran no load"),
        ('"output_throughput", at_least=3', "which this test does not use"),
    ],
)
def test_a_wrong_mark_is_an_error(project, mark, told) -> None:
    floors(project)
    fixture = "sglang_server" if "does not use" in told else "load"
    text = f"import pytest\n@pytest.mark.throughput_floor({mark})\ndef test_it({fixture}): pass\n"
    project.file("test_mine.py", text)
    result = project.run("test_mine.py", "-k", "baseline", rules=rules())
    assert result.code in (1, 2)
    assert told in result.text
