"""The fault table, each fault once (`faults.py --repeat 20` is the proof); and that the counts can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.gpu import sim

from .fault_suite import FAULTS, Fault
from .fault_suite.run import until
from .fault_suite.scene import GRACE, Scene

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


@pytest.mark.parametrize(
    "fault", [pytest.param(one, id=one.name, marks=pytest.mark.slow if one.slow else ()) for one in FAULTS]
)
def test_fault(fault: Fault, alone: Callable[[], AbstractContextManager[None]]) -> None:
    missing = fault.missing()
    if missing:
        pytest.skip(missing)
    # A server without its supervisor is anybody's to end.
    with alone() if fault.name.endswith(" the supervisor") else nullcontext():
        result = fault.perform()
    assert result.counts.numbers() == (0, 0, 0, 0), str(result.counts)
    assert not result.wrong, result.wrong


def test_names_are_unique() -> None:
    assert len({one.name for one in FAULTS}) == len(FAULTS)


def test_the_counts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process left, one GPU in use, one result lost, one stranger hit: each is found."""
    monkeypatch.setattr("tests.process.fault_suite.scene.GRACE", 0.2)
    assert GRACE > 10
    scene = Scene()
    name, _, value = scene.token.partition("=")
    left = subprocess.Popen(["sleep", "60"], env={name: value, "GPUSERVE_RUN_ID": "x"})
    scene.run("-k", "baseline and ready")
    run = scene.runs[0]
    assert run.code == 0
    assert run.folder
    events = run.folder / "events.jsonl"
    run.remember()
    events.write_text("".join(line for line in events.read_text().splitlines(keepends=True) if '"check"' not in line))
    sim.charge(scene.machine, scene.gpus[1], os.getpid(), 4 << 30)
    os.kill(scene.strangers[0].pid, signal.SIGTERM)
    until(scene.strangers[0].hits, "the stranger noted it")
    counts = scene.close()
    left.wait()
    assert left.returncode == -signal.SIGKILL
    assert counts.numbers() == (1, 1, 1, 1), str(counts)
    assert sys.executable
