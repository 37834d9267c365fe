"""Known-bad entries in a run: xfailed, changed, xpassed, and what they never swallow."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

ENTRY = """
schema: 1
entries:
  - id: KB-1
    when: {flag.attention-backend: flashinfer}
    versions: {sglang: ">=0.5.10"}
    expect: {kind: hang, phase: [graph-capture]}
    mode: xfail
    strict: STRICT
    confidence: CONFIDENCE
    source: test
    grade: S
    issue: https://github.com/sgl-project/sglang/issues/1
    reason: it spins
    added: 2026-11-01
    review-by: 2036-11-01
"""
HANG = "- {when: {attention: flashinfer}, then: {hang: graph-capture}}"
CRASH = "- {when: {attention: flashinfer}, then: {crash: {phase: weights, text: 'RuntimeError: other'}}}"
PORT = "- {when: {attention: flashinfer}, then: {port-taken: true}}"


def entry(project, *, strict: bool = False, confidence: str = "confirmed") -> None:
    text = ENTRY.replace("STRICT", str(strict).lower()).replace("CONFIDENCE", confidence)
    project.file("matrices/known_bad.yaml", text)


XDIST = pytest.mark.parametrize("args", [(), ("-n", "2")], ids=["one process", "xdist"])


@XDIST
@pytest.mark.parametrize(
    ("rules", "outcome", "code"),
    [(HANG, "xfailed", 0), (CRASH, "changed", 1), ("", "xpassed", 0), (PORT, "infra", 1)],
    ids=["as expected", "another failure", "no failure", "port taken"],
)
def test_one_entry_and_four_worlds(project, args, rules: str, outcome: str, code: int) -> None:
    entry(project)
    project.stall("graph-capture")
    junit = project.path / "junit.xml"
    result = project.run(*args, "-rxXE", "-k", "flashinfer", f"--junitxml={junit}", rules=rules)
    assert result.outcomes == {"attention.flashinfer": outcome}, result.text
    assert result.code == code, result.text
    cell = result.cells["attention.flashinfer"]
    properties = {
        (case.get("name"), one.get("name")): one.get("value")
        for case in ET.parse(junit).getroot().iter("testcase")
        for one in case.iter("property")
    }
    last = "test_clean_shutdown" if outcome == "xpassed" else "test_ready"
    assert properties[f"{last}[sm120-m-attention.flashinfer]", "gpuserve.outcome"] == outcome
    if outcome == "infra":
        assert cell["known_bad"] is None
        assert cell["server_starts"] == 2  # a port is tried once more
        assert "INFRA" in result.text
        return
    assert cell["known_bad"]["id"] == "KB-1"
    if outcome == "xfailed":
        result.run.stdout.fnmatch_lines(["XFAIL *test_ready*KB-1*"])
        assert (cell["failure"]["kind"], cell["failure"]["phase"]) == ("hang", "graph-capture")
        assert result.checks["attention.flashinfer", "answers"] == "blocked"
    elif outcome == "changed":
        result.run.stdout.fnmatch_lines(["*expected hang in graph-capture (KB-1), was crash in weights: *"])
        assert cell["control"] is None or cell["control"]["outcome"] == "passed"
    else:
        result.run.stdout.fnmatch_lines(["XPASS *test_clean_shutdown*KB-1*retire the entry*known_bad.yaml:4*"])
        assert result.checks["attention.flashinfer", "ready"] == "passed"


def test_a_strict_entry_that_passes_is_red(project) -> None:
    entry(project, strict=True)
    result = project.run("-k", "flashinfer")
    assert result.code == 1
    assert result.outcomes == {"attention.flashinfer": "xpassed"}
    result.run.stdout.fnmatch_lines(["*XPASS(strict)*KB-1*retire the entry*"])


def test_a_reported_entry_that_passes_is_information(project) -> None:
    entry(project, strict=True, confidence="reported")
    result = project.run("-k", "flashinfer")
    assert result.code == 0
    assert result.outcomes == {"attention.flashinfer": "xpassed"}
    assert not {"xpassed", "failed"} & result.run.parseoutcomes().keys()
    assert "only reported" in result.text


def test_not_every_check_ran_so_nothing_is_retired(project) -> None:
    project.file(
        "matrices/known_bad.yaml",
        ENTRY.replace(", phase: [graph-capture]", "").replace("STRICT", "true").replace("CONFIDENCE", "confirmed"),
    )
    result = project.run("-k", "flashinfer and ready")
    assert result.outcomes == {"attention.flashinfer": "passed"}
    assert result.code == 0


SPEED = """
loads:
  small: {concurrency: 2, input: 16, output: 32, windows: 3}
floors:
  - {when: WHEN, load: small, output_throughput: {at-least-ratio: 0.1, of: OF}}
"""


@pytest.mark.parametrize(
    ("args", "when", "of", "outcome"),
    [
        ((), "{attention: flashinfer, graphs: on}", "baseline", "xpassed"),
        (("--gpu-floors", "record"), "{attention: flashinfer, graphs: on}", "baseline", "passed"),
        ((), "{attention: triton, graphs: off}", "{attention: flashinfer, graphs: on}", "passed"),
    ],
    ids=["judged", "only recorded", "only compared with"],
)
def test_speed_that_no_floor_judges_proves_no_slow_entry_wrong(project, args, when: str, of: str, outcome: str) -> None:
    entry(project, strict=True)
    known = project.path / "matrices" / "known_bad.yaml"
    known.write_text(known.read_text().replace("kind: hang, phase: [graph-capture]", "kind: slow"))
    matrix = project.path / "matrices" / "tiny.yaml"
    matrix.write_text(matrix.read_text() + SPEED.replace("WHEN", when).replace("OF", of))
    result = project.run(*args, rules="- {when: {}, then: {tokens-per-second: 400}}")
    assert result.checks["attention.flashinfer", "throughput"] == "passed", result.text
    assert result.outcomes["attention.flashinfer"] == outcome, result.text
    assert result.code == (outcome == "xpassed")


def test_a_skip_entry_never_launches(project) -> None:
    project.file(
        "matrices/known_bad.yaml",
        ENTRY.replace("mode: xfail", "mode: skip").replace("STRICT", "false").replace("CONFIDENCE", "confirmed"),
    )
    result = project.run("-k", "flashinfer")
    assert result.outcomes == {"attention.flashinfer": "skipped"}
    assert result.record["server_starts"] == 0
    assert "KB-1" in result.cells["attention.flashinfer"]["reason"]


def test_an_xfailed_baseline_blocks_nothing(project) -> None:
    text = ENTRY.replace("{flag.attention-backend: flashinfer}", "{flag.attention-backend: triton, arch: sm120}")
    project.file("matrices/known_bad.yaml", text.replace("STRICT", "false").replace("CONFIDENCE", "confirmed"))
    rule = "- {when: {attention: triton, graphs: 'on'}, then: {hang: graph-capture}}"
    project.stall("graph-capture")
    result = project.run("-k", "baseline or flashinfer", rules=rule)
    assert result.outcomes == {"baseline": "xfailed", "attention.flashinfer": "passed"}


def test_what_is_never_turned_into_xfail(project) -> None:
    """A leak in an entry's cell, and a user's own xfail mark over a server that cannot be had."""
    entry(project)
    project.file(
        "test_mine.py",
        """
        import pytest
        @pytest.mark.xfail
        def test_own(sglang_server): raise ValueError("its own business")
        """,
    )
    leak = "- {when: {attention: flashinfer}, then: {hang: graph-capture, hold-memory: forever}}"
    project.stall("graph-capture")
    result = project.run("-k", "flashinfer and ready", rules=leak)
    assert result.outcomes == {"attention.flashinfer": "failed"}
    assert result.cells["attention.flashinfer"]["failure"]["kind"] == "leak"
    counted = result.run.parseoutcomes()
    assert (counted["xfailed"], counted["errors"]) == (1, 1)

    result = project.run("test_mine.py", "-k", "baseline")
    assert (result.code, result.outcomes) == (0, {"baseline": "xfailed"})
    taken = "- {when: {}, then: {port-taken: true}}"
    result = project.run("test_mine.py", "-k", "baseline", rules=taken)
    assert (result.code, result.outcomes) == (1, {"baseline": "infra"})
