"""Floors that compare with another cell compare what is comparable, and what cannot be judged is never hidden."""

from __future__ import annotations

import re

import pytest

LOADS = """
loads:
  small: {concurrency: 2, input: 16, output: 64, windows: 3}
floors:
"""
STEADY = "- {when: {}, then: {tokens-per-second: 400}}\n"
BOTH = """
  - when: {attention: flashinfer}
    load: small
    output_throughput: {at-least-ratio: 0.5, of: baseline}
  - when: {graphs: off}
    load: small
    output_throughput: {at-least-ratio: 0.5, of: baseline}
"""


def floors(project, text: str) -> None:
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text() + LOADS + text)


def speed(cell: dict, test: str = "") -> dict:
    (row,) = [
        row for row in cell["measurements"] if row["metric"] == "output_throughput" and row["test"].endswith(test)
    ]
    return row


def test_a_slow_gpu_is_not_blamed_on_the_cell_that_ran_there(project) -> None:
    """Two equal cells, one of them on a GPU of a quarter of the speed: the baseline is started there too."""
    floors(project, BOTH)
    result = project.run("-n", "2", rules=f"{STEADY}- {{when: {{gpu: 1}}, then: {{slow: 4}}}}")
    assert result.code == 0, result.text
    baseline = result.cells["baseline"]
    deltas = [result.cells["attention.flashinfer"], result.cells["graphs.off"]]
    assert {speed(cell)["verdict"] for cell in deltas} == {"ok"}
    (elsewhere,) = [cell for cell in deltas if cell["gpus"] != baseline["gpus"]]
    assert speed(elsewhere)["median"] < 0.4 * speed(baseline)["median"]
    assert elsewhere["telemetry"]["small"]["beside"] == {"sm120-m-baseline": 1}
    assert "sm120-m-baseline ran on other GPUs" in speed(elsewhere)["note"]
    assert "and was started on these too" in speed(elsewhere)["note"]
    (log,) = (result.folder / elsewhere["folder"]).glob("sm120-m-baseline-2/server.log")
    assert "server_args=" in log.read_text()


LITTLE = (1, 0.999, 1.001)
EQUAL = """
  - when: {attention: flashinfer}
    load: small
    output_throughput: {at-least-ratio: 1.0, of: baseline}
"""


def test_a_lucky_start_of_the_reference_does_not_make_its_equal_slow(project) -> None:
    """Starts of one thing differ by 12 %: the baseline's first was the lucky one."""
    floors(project, EQUAL)
    # In turns: baseline; flashinfer; baseline, flashinfer; baseline, flashinfer.
    project.speeds(112, 100, 100.5, 101, 101.5, 100.8, noise=LITTLE)
    result = project.run("-k", "baseline or flashinfer", rules=STEADY)
    assert result.code == 0, result.text
    cell = result.cells["attention.flashinfer"]
    row = speed(cell)
    assert (row["verdict"], row["starts"]) == ("inconclusive", [3, 3, 3])
    assert cell["telemetry"]["small"]["beside"] == {"sm120-m-baseline": 2}
    assert "(3 starts of sm120-m-baseline)" in row["note"]
    assert cell["server_starts"] == 5
    assert result.checks["attention.flashinfer", "clean-shutdown"] == "passed"
    assert result.cells["baseline"]["server_starts"] == 1


def test_a_reference_that_cannot_be_started_there_is_said(project) -> None:
    """On the other GPU the baseline crashes: nothing can be said of the cell that ran there, and it is not failed."""
    floors(project, BOTH)
    crash = "- {when: {gpu: 1, attention: triton, graphs: on}, then: {crash: {phase: weights, text: boom}}}"
    result = project.run("-n", "2", "-rs", rules=f"{STEADY}- {{when: {{gpu: 1}}, then: {{slow: 4}}}}\n{crash}")
    assert result.code == 0, result.text
    baseline = result.cells["baseline"]
    (elsewhere,) = [
        cell
        for cell in (result.cells["attention.flashinfer"], result.cells["graphs.off"])
        if cell["gpus"] != baseline["gpus"]
    ]
    row = speed(elsewhere)
    assert row["verdict"] == "inconclusive"
    assert "sm120-m-baseline could not be started on these GPUs: " in row["note"]
    assert "on 2 starts against 0 starts of sm120-m-baseline on these GPUs" in row["note"]
    assert result.checks[elsewhere["id"].removeprefix("sm120-m-"), "clean-shutdown"] == "passed"


BESIDE = """
import os, time
from pathlib import Path
from pytest_gpuserve.gpu import sim

start_beside = measuring.Measuring.start_beside

def faulty(self, handle, measured):
    {fault}
    return start_beside(self, handle, measured)

measuring.Measuring.start_beside = faulty
"""


def test_a_reference_that_dies_in_its_load_leaves_the_cell_as_it_is(project) -> None:
    floors(project, EQUAL)
    fault = BESIDE.format(fault="os.kill(handle.pid, 9)")
    project.speeds(112, *[100] * 9, noise=LITTLE, more=fault)
    result = project.run("-k", "baseline or flashinfer", rules=STEADY)
    assert result.code == 0, result.text
    cell = result.cells["attention.flashinfer"]
    assert speed(cell)["verdict"] == "inconclusive"
    assert "sm120-m-baseline did not come through on these GPUs: " in speed(cell)["note"]
    # One start after the baseline's, since the first server is gone; more could decide nothing.
    assert speed(cell)["starts"] == [3, 3]
    assert result.checks["attention.flashinfer", "clean-shutdown"] == "passed"
    files = {path.name for path in (result.folder / cell["folder"]).iterdir()}
    assert {"server.log", "server-3.log", "sm120-m-baseline-2"} <= files
    assert "evidence.json" not in files


def test_what_a_reference_leaves_behind_is_not_the_cells_leak(project) -> None:
    """The baseline's second start keeps memory: its GPU cannot be used any more, and the cell is not to blame."""
    floors(project, EQUAL)
    hold = "sim.hold(Path(self._plan.probes['sm120']['dir']), handle.gpus[0].uuid, 4 << 30, None)"
    project.speeds(112, *[100] * 9, noise=LITTLE, more=BESIDE.format(fault=hold))
    result = project.run("-k", "baseline or flashinfer", sim="1xsm120", rules=STEADY)
    cell = result.cells["attention.flashinfer"]
    assert cell["outcome"] == "infra", result.text
    told = "sm120-m-baseline was started on these GPUs to compare with, and left something behind"
    assert told in cell["failure"]["message"]
    assert result.checks["attention.flashinfer", "clean-shutdown"] == "blocked"
    assert "ERROR at teardown" not in result.text


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_test_that_is_cut_off_beside_a_reference_says_where_it_was(project, method) -> None:
    floors(project, EQUAL)
    fault = BESIDE.format(fault="time.sleep(60)")
    project.speeds(112, *[100] * 9, noise=LITTLE, more=fault)
    limit = ("--timeout=6", f"--timeout-method={method}")
    result = project.run(*limit, "-k", "baseline or flashinfer", rules=STEADY)
    text = result.text + result.errors
    assert "sm120-m-attention.flashinfer, which is being compared with sm120-m-baseline, in phase serving" in text
    assert re.search(r"sm120-m-baseline-\d/server\.log", text)
    if method == "signal":
        assert result.checks["attention.flashinfer", "clean-shutdown"] == "passed"
        cell = result.folder / result.cells["attention.flashinfer"]["folder"]
        assert {"server.log", "server-3.log"} <= {path.name for path in cell.iterdir()}


FLOOR = """
  - when: {attention: triton, graphs: on}
    load: small
    output_throughput: {at-least: 100000, unit: tok/s}
"""


def test_a_users_load_of_the_same_name_does_not_hide_what_the_check_found(project) -> None:
    floors(project, FLOOR)
    project.file("test_mine.py", "def test_mine(load): assert load('small')['output_throughput'].median > 1")
    project.file("pytest.ini", "[pytest]\ntestpaths = .\n")
    result = project.run("-k", "baseline", rules=STEADY)
    cell = result.cells["baseline"]
    assert cell["failure"]["kind"] == "slow", result.text
    assert result.checks["baseline", "test_mine"] == "passed"
    assert speed(cell, "test_mine.py::test_mine")["verdict"] == "recorded"
    assert [row["verdict"] for row in cell["measurements"] if row["floor"]] == ["below-floor"]
    assert set(cell["telemetry"]) == {"small", "small (test_mine.py::test_mine)"}
    requests = cell["telemetry"]["small"]["requests"]
    assert requests["sent"] == requests["completed"] + requests["cancelled"] > 0


def test_every_reason_is_visible_and_none_hides_another(project) -> None:
    """Output that is not checked comes first, and is no reason to say nothing of the floor."""
    history = "  - {when: {}, load: small, output_throughput: {at-least-of-history: 0.8, last: 2}}\n"
    floors(project, history)
    file = project.path / "matrices" / "tiny.yaml"
    file.write_text(file.read_text().replace("triton: {flags: {", "triton: {flags: {load-format: dummy, "))
    result = project.run("-k", "baseline", rules=STEADY)
    reason = result.cells["baseline"]["reason"]
    assert "output not checked" in reason, result.text
    assert "inconclusive: small: output_throughput cannot be judged: no history" in reason
