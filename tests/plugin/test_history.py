"""Floors relative to earlier runs, in whole runs, simulated: what those runs may and may not say."""

from __future__ import annotations

FLOOR = """
loads:
  small: {concurrency: 2, input: 16, output: 32, windows: 3}
floors:
  - when: {attention: triton, graphs: on}
    load: small
    output_throughput: {at-least-of-history: 0.8, last: 1}
"""
STEADY = "- {when: {}, then: {tokens-per-second: 400}}\n"
SLOW = f"{STEADY}- {{when: {{}}, then: {{slow: 3}}}}"


def test_a_slow_run_is_no_history_whatever_else_was_measured_in_it(project) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + FLOOR)
    only = ("-k", "baseline and throughput")
    assert project.run(*only, rules=STEADY).code == 0
    # A test of the user's own measures the same load, and judges nothing.
    project.file("test_mine.py", 'def test_throughput_of_mine(load):\n    load("small")\n')
    project.file("pytest.ini", "[pytest]\ntestpaths = test_mine.py\n")
    for _ in range(2):
        result = project.run(*only, rules=SLOW)
        assert result.outcomes == {"baseline": "failed"}, result.text
        assert result.cells["baseline"]["failure"]["kind"] == "slow"


def test_a_record_in_the_report_folder_that_is_none_of_ours_is_named(project) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + FLOOR)
    project.file(".gpuserve/runs/20000101T000000Z-odd/run.json", '{"cells": ["x"], "measurements": ["odd"]}')
    result = project.run("-k", "baseline and throughput", "-rs", rules=STEADY)
    assert result.code == 0, result.text
    assert result.checks == {("baseline", "throughput"): "skipped"}
    assert "no history: 0 records" in result.text
    assert "20000101T000000Z-odd/run.json: left out of the history" in result.text
