"""A process that is not ours takes a GPU's memory while a server runs on it. Real processes on simulated GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.gpu import sim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTRUDER = Path(__file__).parents[1] / "intruder.py"
# Long enough phases for somebody to come in one of them, and a server that needs a good part of the GPU.
SLOW = "schema: 1\ndefaults: {phase-seconds: 1.0, tokens-per-second: 5000, memory-gib: 40}\n"
# A gate that waits for 2 s instead of a minute.
IMPATIENT = """
from pytest_gpuserve.model.launch import LeaseRequest

LeaseRequest.__init__.__kwdefaults__["admission_timeout"] = 2.0
"""


@pytest.fixture
def machine(project, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = project.path / "machine"
    folder.mkdir()
    monkeypatch.setenv("GPUSERVE_SIM_DIR", str(folder))
    return folder


@pytest.fixture
def come(project, machine: Path) -> Iterator[Callable[..., int]]:
    """Starts an intruder; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(words: str, phase: str, *, gpu: int = 0, gib: int = 80, size: str = "1xsm120", **how: bool) -> int:
        uuid = sim.create(machine, size, **how).gpus()[gpu].uuid
        words_of_it = [sys.executable, str(INTRUDER), str(machine), uuid, str(gib), str(project.path), words, phase]
        started.append(subprocess.Popen(words_of_it))
        return started[-1].pid

    yield start
    for one in started:
        one.kill()
        one.wait()


def run(project, *args: str, **how: Any):
    scenario = project.file("slow.yaml", SLOW)
    return project.run("--gpu-sim-scenario", str(scenario), *args, sim="1xsm120", **how)


def test_a_start_that_was_robbed_of_its_memory_is_repeated_once_the_robber_is_gone(project, come) -> None:
    """It goes when the second lease waits for the GPU."""
    pid = come("Load weight begin", "admission")
    result = run(project, "-k", "baseline")
    cell = result.cells["baseline"]
    assert (cell["outcome"], cell["server_starts"]) == ("passed", 2)
    (twice,) = [note for note in cell["notes"] if note.startswith("started twice: ")]
    assert f"pid {pid} (" in twice
    assert "80.0 GiB on GPU 0, there since " in twice
    assert "after the launch (weights)" in twice
    assert any(note.startswith(f"not alone on its GPUs: pid {pid} (") for note in cell["notes"])
    assert "mem-fraction-static" not in result.text
    assert result.code == 0


def test_a_robber_that_stays_makes_infra_of_the_cell_and_no_leak(project, come) -> None:
    project.file("conftest.py", IMPATIENT)
    pid = come("Load weight begin", "never")
    result = run(project, "-k", "baseline or flashinfer")
    failure = result.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("infra", "weights")
    assert failure["message"].startswith(f"another process used the server's GPU: pid {pid} (")
    assert "It was not started again: " in failure["message"]
    assert result.cells["baseline"]["control"] is None
    assert result.cells["baseline"]["teardown"]["memory_release_seconds"] is not None
    assert any(f"pid {pid} (" in text for text in result.cells["baseline"]["teardown"]["foreign"])
    assert "leak" not in {(cell["failure"] or {}).get("kind") for cell in result.cells.values()}
    assert "left in use by" not in result.text
    assert not (result.folder / "quarantine").exists()
    assert result.outcomes["baseline"] == "infra"


def test_a_stranger_beside_a_server_that_passed_is_no_leak_and_the_gpu_is_used_again(project, come) -> None:
    """Little memory, taken once the server is ready, and given up when the next cell waits for the GPU."""
    pid = come("The server is fired up", "admission", gib=4)
    result = run(project, "-k", "baseline or flashinfer")
    assert result.outcomes == {"baseline": "infra", "attention.flashinfer": "passed"}
    failure = result.cells["baseline"]["failure"]
    assert f"pid {pid} (" in failure["message"]
    assert "4.0 GiB on GPU 0" in failure["message"]
    assert "left nothing behind" in failure["message"]
    assert "is quarantined" not in result.text


def test_where_no_pids_are_listed_it_is_said_who_was_not_looked_for(project, come) -> None:
    """What is left after the server's end may be its own: no control run can tell, and that is said too."""
    come("Load weight begin", "never", processes=False)
    failure = run(project, "-k", "flashinfer").cells["attention.flashinfer"]["failure"]
    assert failure["kind"] == "oom"
    assert "Not checked who held memory of GPU 0: the driver lists no processes there." in failure["message"]
    assert "The machine is unverified: its GPUs did not become free for a control run." in failure["message"]
