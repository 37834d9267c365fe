"""The simulated machine: files in a directory, and what a probe reads from them."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import open_probe, process, sim
from pytest_gpuserve.gpu.sim import SimProbe, charge, create, hold, mark_foreign, parse_machine
from pytest_gpuserve.model.gpu import GpuProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def used(probe: SimProbe, index: int = 0) -> int:
    gpu = probe.gpus()[index]
    memory = probe.read(gpu.uuid).memory_used
    assert memory is not None
    return memory - sim.MODELS[gpu.arch].idle


def test_machine_looks_like_its_arch_and_says_simulated(tmp_path: Path) -> None:
    probe = create(tmp_path / "m", "8xsm120")
    assert [gpu.index for gpu in probe.gpus()] == list(range(8))
    gpu = probe.gpus()[0]
    assert gpu.name == "NVIDIA RTX PRO 6000 Blackwell Server Edition (SIMULATED)"
    assert (gpu.arch, gpu.links) == ("sm120", ())
    assert 95 < (gpu.memory_total or 0) / GIB < 96
    assert probe.simulated
    assert probe.driver()["driver"] == "SIMULATED"
    assert [one.numa for one in probe.gpus()] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("arch", sim.MODELS)
def test_every_arch_idles_at_a_few_hundred_mib_without_processes(tmp_path: Path, arch: str) -> None:
    probe = create(tmp_path, f"2x{arch}")
    reading = probe.read(probe.gpus()[1].uuid)
    assert reading.processes == ()
    if arch == "sm121":
        assert reading.memory_used is None
        assert probe.gpus()[0].memory_total is None
    else:
        assert reading.memory_used is not None
        assert 300 << 20 < reading.memory_used < 700 << 20
    assert all(one.links for one in probe.gpus()) == (arch in {"sm80", "sm90", "sm100", "sm103"})


def test_uuids_are_stable_for_a_directory_and_differ_between_two(tmp_path: Path) -> None:
    first = create(tmp_path / "a", "2xsm90").gpus()
    assert create(tmp_path / "a", "2xsm90").gpus() == first
    assert open_probe({"kind": "sim", "dir": str(tmp_path / "a")}).gpus() == first
    other = create(tmp_path / "b", "2xsm90").gpus()
    assert len({gpu.uuid for gpu in (*first, *other)}) == 4
    assert all(gpu.uuid.startswith("GPU-SIM-") for gpu in first)


def test_directory_of_another_machine_is_refused(tmp_path: Path) -> None:
    create(tmp_path, "2xsm90")
    with pytest.raises(UsageError, match=r"another simulated machine \(2xsm90\)"):
        create(tmp_path, "4xsm90")


@pytest.mark.parametrize(
    "machine", ["", "sm120", "8x", "0xsm120", "65xsm120", "8xsm12", "8 sm120", "xsm120", "-1xsm90"]
)
def test_bad_machine_names_the_archs(machine: str) -> None:
    with pytest.raises(UsageError, match="sm89, sm90, sm100, sm103, sm120, sm121"):
        parse_machine(machine)


def test_bad_arch_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="Did you mean sm12"):
        parse_machine("8xsm1200")


def test_memory_is_its_process_s_and_goes_with_it(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    probe = create(tmp_path, "2xsm90")
    uuid = probe.gpus()[0].uuid
    charge(tmp_path, uuid, child.pid, 3 * GIB)
    charge(tmp_path, uuid, child.pid, 40 * GIB)
    charge(tmp_path, uuid, os.getpid(), GIB)
    assert used(probe) == 41 * GIB
    assert used(probe, 1) == 0
    assert set(probe.read(uuid).processes or ()) == {
        GpuProcess(pid=child.pid, memory=40 * GIB, start=process.start_of(child.pid)),
        GpuProcess(pid=os.getpid(), memory=GIB, start=process.start_of(os.getpid())),
    }
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie has given its memory back too
    assert used(probe) == GIB
    charge(tmp_path, uuid, os.getpid(), 0)
    assert used(probe) == 0


def test_dead_process_cannot_be_charged(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    probe = create(tmp_path, "1xsm90")
    end(child)
    with pytest.raises(MachineError, match=f"pid {child.pid} has no GPU memory"):
        charge(tmp_path, probe.gpus()[0].uuid, child.pid, GIB)


def test_held_memory_is_nobodys_and_ends_in_time(tmp_path: Path) -> None:
    probe = create(tmp_path, "1xsm90")
    uuid = probe.gpus()[0].uuid
    hold(tmp_path, uuid, GIB, time.monotonic() - 0.001)
    assert used(probe) == 0
    hold(tmp_path, uuid, 2 * GIB, time.monotonic() + 600)
    hold(tmp_path, uuid, 4 * GIB, None)
    assert used(probe) == 6 * GIB
    assert probe.read(uuid).processes == ()
    sim.clear(tmp_path, uuid)
    assert used(probe) == 0


@pytest.mark.parametrize("linger", [600.0, math.inf])
def test_lingering_memory_outlives_its_process_but_is_not_listed(
    tmp_path: Path, child: subprocess.Popen[bytes], linger: float
) -> None:
    probe = create(tmp_path, "1xsm90")
    uuid = probe.gpus()[0].uuid
    charge(tmp_path, uuid, child.pid, GIB, linger=linger)
    end(child)
    assert used(probe) == GIB
    assert used(probe) == GIB
    assert probe.read(uuid).processes == ()


def test_lingering_memory_ends_after_its_time(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = create(tmp_path, "1xsm90")
    charge(tmp_path, probe.gpus()[0].uuid, child.pid, GIB, linger=30)
    end(child)
    assert used(probe) == GIB
    later = time.monotonic() + 30
    monkeypatch.setattr(sim.time, "monotonic", lambda: later)
    assert used(probe) == 0


def test_machine_without_process_lists(tmp_path: Path) -> None:
    probe = create(tmp_path, "1xsm90", processes=False)
    uuid = probe.gpus()[0].uuid
    charge(tmp_path, uuid, os.getpid(), GIB)
    assert probe.read(uuid).processes is None
    assert used(probe) == GIB
    assert create(tmp_path, "1xsm90").read(uuid).processes is None


def test_foreign_process_is_listed_though_its_pid_is_not_here(tmp_path: Path) -> None:
    probe = create(tmp_path, "1xsm121")
    uuid = probe.gpus()[0].uuid
    mark_foreign(tmp_path, uuid, 4_000_000_000, GIB)
    assert [item.pid for item in probe.read(uuid).processes or ()] == [4_000_000_000]
    mark_foreign(tmp_path, uuid, 4_000_000_000, 0)
    assert probe.read(uuid).processes == ()


def test_nvml_failure_switch_for_one_and_for_all(tmp_path: Path) -> None:
    probe = create(tmp_path, "2xsm90")
    first, second = (gpu.uuid for gpu in probe.gpus())
    sim.fail(tmp_path, "GPU is lost", first)
    with pytest.raises(MachineError, match=r"GPU 0 .*GPU is lost \(SIMULATED\)"):
        probe.read(first)
    probe.read(second)
    sim.fail(tmp_path, None, first)
    probe.read(first)
    sim.fail(tmp_path, "Uninitialized")
    for uuid in (first, second):
        with pytest.raises(MachineError, match="Uninitialized"):
            probe.read(uuid)


def test_scripted_utilization(tmp_path: Path) -> None:
    probe = create(tmp_path, "1xsm90")
    uuid = probe.gpus()[0].uuid
    idle = probe.read(uuid)
    sim.set_utilization(tmp_path, uuid, 100)
    busy = probe.read(uuid)
    assert (idle.utilization, busy.utilization) == (0, 100)
    assert (idle.power or 0) < (busy.power or 0) <= (busy.power_limit or 0)
    assert (idle.throttle, busy.throttle) == (("GpuIdle",), ())


def test_no_machine_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="--gpu-sim makes one"):
        SimProbe(tmp_path)
    probe = create(tmp_path, "1xsm90")
    for act in (lambda: probe.read("GPU-x"), lambda: charge(tmp_path, "GPU-x", os.getpid(), 1)):
        with pytest.raises(MachineError, match="no GPU GPU-x"):
            act()


WRITER = """
import os, sys
from pathlib import Path
from pytest_gpuserve.gpu.sim import charge
for turn in range(600):
    charge(Path(sys.argv[1]), sys.argv[2], os.getpid(), (turn % 2 + 1) << 30)
print(flush=True)
input()
"""


def test_readers_see_whole_values_while_several_processes_write(tmp_path: Path) -> None:
    probe = create(tmp_path, "1xsm90")
    uuid = probe.gpus()[0].uuid
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for _ in range(3)
    ]
    streams = [writer.stdout for writer in writers if writer.stdout]
    done: set[object] = set()
    while len(done) < len(writers):
        seen = probe.read(uuid).processes or ()
        assert {item.memory for item in seen} <= {GIB, 2 * GIB}
        done |= set(select.select([stream for stream in streams if stream not in done], [], [], 0)[0])
    assert used(probe) == 3 * 2 * GIB
    for writer in writers:
        writer.communicate(b"\n")
        assert writer.returncode == 0
    assert used(probe) == 0
