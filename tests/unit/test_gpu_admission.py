"""Whether a GPU is free."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.gpu import notes, process, sim
from pytest_gpuserve.gpu.admission import GIB, Gate, believable_idle, judge, remains
from pytest_gpuserve.gpu.notes import Note, write_json
from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Reading

if TYPE_CHECKING:
    from pathlib import Path

H200 = Gpu(index=3, uuid="GPU-x", name="NVIDIA H200", arch="sm90", memory_total=141 * GIB)
GB10 = Gpu(index=0, uuid="GPU-y", name="NVIDIA GB10", arch="sm121", memory_total=None)
MIB = 1 << 20
ME = GpuProcess(pid=os.getpid(), memory=76 * GIB, start=process.start_of(os.getpid()))


def reading(memory: int | None, processes: tuple[GpuProcess, ...] | None = ()) -> Reading:
    return Reading(uuid="any", memory_used=memory, processes=processes)


def note(**facts: object) -> Note:
    given = {"uuid": "GPU-x", "index": 0, "lease": "r-1", "run_id": "r", "cell": "c", "phase": "ready"} | facts
    return Note.of_this_process(**given)


@pytest.mark.parametrize(
    ("memory", "idle", "free"),
    [
        (615 * MIB, None, True),
        (615 * MIB, 615 * MIB, True),
        (800 * MIB, 615 * MIB, True),
        (1200 * MIB, 615 * MIB, False),
        (4 * GIB, None, True),
        (5 * GIB, None, False),
        (0, 615 * MIB, True),
    ],
)
def test_memory_against_the_idle_reading(memory: int, idle: int | None, free: bool) -> None:
    assert (not judge(H200, reading(memory), idle).occupants) == free


def test_first_free_reading_becomes_the_idle_one_and_a_busy_one_does_not() -> None:
    assert judge(H200, reading(615 * MIB), None).idle == 615 * MIB
    assert judge(H200, reading(615 * MIB, (ME,)), None).idle is None
    assert judge(H200, reading(80 * GIB), None).idle is None
    assert judge(H200, reading(700 * MIB), 615 * MIB).idle == 615 * MIB


def test_process_is_named_with_memory_and_gpu() -> None:
    (text,) = judge(H200, reading(77 * GIB, (ME,)), 615 * MIB).occupants
    assert re.fullmatch(rf"pid {os.getpid()} \(.+, \w+\) 76.0 GiB on GPU 3", text)
    (text,) = judge(GB10, reading(None, (GpuProcess(pid=4_000_000_000),)), None).occupants
    assert text == "pid 4000000000 (not visible from here) on GPU 0"


def test_a_pid_that_may_be_of_another_namespace_gets_no_name() -> None:
    """NVML in a container may list the host's pids: here pid 1 is another process."""
    state = judge(H200, reading(77 * GIB, (GpuProcess(pid=1, memory=75 * GIB),)), 615 * MIB)
    assert state.occupants == ("pid 1 (not identified: it may be of another PID namespace) 75.0 GiB on GPU 3",)
    assert state.unidentified


def test_nothing_is_called_the_gpus_user_that_has_no_gpu_open() -> None:
    """Its number is all that NVML and this process have in common."""
    assert process.gpu_user(os.getpid()) is None
    assert process.gpu_user(4_000_000_000) is None


def test_a_strangers_memory_is_kept_apart_from_what_is_left(tmp_path: Path) -> None:
    probe = sim.create(tmp_path / "sim", "1xsm90")
    (gpu,) = probe.gpus()
    gate = Gate(probe, tmp_path)
    sim.charge(tmp_path / "sim", gpu.uuid, os.getpid(), 76 * GIB)
    state = gate.look(gpu, lambda item: item.pid == os.getpid())
    assert state.occupants == ()
    assert len(state.foreign) == 1
    sim.hold(tmp_path / "sim", gpu.uuid, 20 * GIB, None)
    (left,) = gate.look(gpu, lambda item: item.pid == os.getpid()).occupants
    assert "no process has it" in left


def test_process_alone_is_enough_on_an_otherwise_idle_gpu() -> None:
    assert judge(H200, reading(615 * MIB, (replace(ME, memory=0),)), 615 * MIB).occupants


def test_memory_of_nobody_says_whether_processes_could_be_seen() -> None:
    assert judge(H200, reading(77 * GIB), 615 * MIB).occupants == (
        "77.0 GiB in use on GPU 3, idle is 0.6 GiB, no process has it",
    )
    assert judge(H200, reading(77 * GIB, None), None).occupants == (
        "77.0 GiB in use on GPU 3, at most 4.0 GiB is believed idle, no process is listed",
    )


def test_what_cannot_be_checked_is_said() -> None:
    assert judge(H200, reading(615 * MIB), None).unchecked == ()
    assert judge(H200, reading(615 * MIB, None), None).unchecked == ("processes of GPU 3 (the driver lists none)",)
    state = judge(GB10, reading(None), None)
    assert (state.occupants, state.idle) == ((), None)
    assert state.unchecked == ("memory of GPU 0 (the driver has no figure)",)


def test_believable_idle_grows_with_the_gpu_within_bounds() -> None:
    sizes = [None, 8 * GIB, 24 * GIB, 48 * GIB, 96 * GIB, 270 * GIB]
    assert [round(believable_idle(size) / GIB, 1) for size in sizes] == [1.5, 1.5, 1.5, 2.4, 4.0, 4.0]


def test_recorded_idle_reading_is_kept_for_one_boot_and_only_if_believable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = sim.create(tmp_path / "sim", "1xsm90")
    (gpu,) = probe.gpus()
    gate = Gate(probe, tmp_path)
    gate.record(gpu, 100 * MIB)
    gate.record(gpu, 3 * GIB)
    assert gate.look(gpu).occupants  # 615 MiB is more than the recorded 100 and the tolerance
    write_json(gate.path(gpu), {"memory": 90 * GIB, "boot": notes.boot_id()})
    assert not gate.look(gpu).occupants
    sim.hold(tmp_path / "sim", gpu.uuid, 60 * GIB, None)
    assert gate.look(gpu).occupants  # a reading of 90 GiB is nobody's idle
    sim.clear(tmp_path / "sim", gpu.uuid)
    write_json(gate.path(gpu), {"memory": 100 * MIB, "boot": "an earlier one"})
    assert not gate.look(gpu).occupants
    gate.path(gpu).write_text("[]")
    assert not gate.look(gpu).occupants


def test_unreadable_gpu_is_not_free(tmp_path: Path) -> None:
    probe = sim.create(tmp_path, "1xsm90")
    (gpu,) = probe.gpus()
    sim.fail(tmp_path, "GPU is lost")
    (text,) = Gate(probe, tmp_path).look(gpu).occupants
    assert "GPU 0 cannot be read" in text
    assert "GPU is lost" in text
    with pytest.raises(MachineError):
        probe.read(gpu.uuid)


def test_process_of_a_dead_lease_is_found_by_its_mark_and_one_of_another_lease_is_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-Sc", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"GPUSERVE_LEASE": "r-dead"},
    ) as child:
        assert child.stdout
        child.stdout.readline()
        (text,) = remains([note(lease="r-dead")])
        assert text.startswith(f"pid {child.pid} (python")
        assert text.endswith("left by an earlier lease")
        assert remains([note(lease="r-other", orphans=("r-dead",))])
        assert remains([note(lease="r-other")]) == []
        child.kill()
    assert remains([note(lease="r-dead")]) == []
    assert remains([]) == []


def test_process_of_a_dead_lease_is_found_by_its_pid_unless_the_pid_was_used_again() -> None:
    start = notes.process.start_of(os.getpid())
    assert start is not None
    assert remains([note(pids=((os.getpid(), start),))])
    assert remains([note(pids=((os.getpid(), start - 1),))]) == []
    assert remains([replace(note(pids=((os.getpid(), start),)), namespace="pid:[1]")]) == []
