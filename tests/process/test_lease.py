"""Leases of one process on a simulated machine: the gate, the notes, the quarantine, the errors."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.gpu import lease as leases
from pytest_gpuserve.gpu import process, sim
from pytest_gpuserve.gpu.cpu import CpuProbe
from pytest_gpuserve.gpu.lease import Lease, acquire, holders, quarantined
from pytest_gpuserve.gpu.notes import Note, read_note, write_note
from pytest_gpuserve.model.launch import LeaseRequest

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


class Machine:
    """A simulated machine and its lock directory."""

    def __init__(self, folder: Path, name: str, **facts: Any) -> None:
        self.folder = folder / "sim"
        self.locks = folder / "locks"
        self.probe = sim.create(self.folder, name, **facts)
        self.uuids = tuple(gpu.uuid for gpu in self.probe.gpus())
        self.waits: list[tuple[float, list[str]]] = []

    def request(self, count: int = 1, **facts: Any) -> LeaseRequest:
        given = {
            "count": count,
            "allowed": self.uuids,
            "probe": self.probe.spec(),
            "lock_dir": str(self.locks),
            "lock_timeout": 30.0,
            "admission_timeout": 30.0,
            "owners": (),
            "run_id": "run1",
            "holder": "sm90-x-baseline",
        }
        return LeaseRequest(**given | facts)

    def take(self, count: int = 1, **facts: Any) -> Lease:
        return acquire(self.request(count, **facts), self.probe, lambda *told: self.waits.append(told))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "8xsm90")


def test_lease_has_the_gpus_their_idle_memory_and_a_note_until_it_is_released(machine: Machine) -> None:
    with machine.take(2) as lease:
        assert [gpu.index for gpu in lease.gpus] == [0, 1]
        assert lease.idle == dict.fromkeys(machine.uuids[:2], 615 << 20)
        assert lease.unchecked == []
        assert lease.free()
        lease.note(phase="weights", cell="sm90-x-graphs.off", pids=[os.getpid(), 4_000_000])
        first, second = holders(machine.locks)
        assert first.note is not None
        assert (first.note.phase, first.note.cell, first.note.lease) == ("weights", "sm90-x-graphs.off", lease.id)
        assert first.note.pids == ((os.getpid(), process.start_of(os.getpid())),)
        assert (first.held, second.held, first.stale) == (True, True, None)
    assert holders(machine.locks) == []
    lease.release()
    assert machine.waits == []


def test_note_refuses_what_it_does_not_know(machine: Machine) -> None:
    with machine.take() as lease, pytest.raises(TypeError, match="has no fase"):
        lease.note(fase="weights")


def test_two_leases_of_one_process_exclude_each_other_too(machine: Machine) -> None:
    with machine.take(5) as first, machine.take(3) as second:
        assert {gpu.index for gpu in (*first.gpus, *second.gpus)} == set(range(8))
        with pytest.raises(MachineError):
            machine.take(1, lock_timeout=0)


def test_timeout_names_who_holds_which_gpu_since_when_and_what_to_do(machine: Machine) -> None:
    with machine.take(8) as lease:
        lease.note(phase="graph-capture")
        with pytest.raises(MachineError) as failure:
            machine.take(2, lock_timeout=0, holder="other")
    lines = str(failure.value).splitlines()
    assert lines[0] == f"other waited 0 s for 2 of 8 GPUs (locks in {machine.locks}):"
    user = process.user_name(os.geteuid())
    assert lines[4].startswith(
        f"  GPU 3: held by {user}, pid {os.getpid()}, sm90-x-baseline, phase graph-capture, for "
    )
    assert "--gpu-lock-timeout" in lines[-1]
    machine.take(8, lock_timeout=0).release()


def test_waiting_is_told_about_once_a_second_and_what_the_listener_raises_ends_it_with_nothing_held(
    machine: Machine,
) -> None:
    told: list[tuple[float, list[str]]] = []

    def listen(seconds: float, who: list[str]) -> None:
        told.append((seconds, who))
        if len(told) == 2:
            raise KeyboardInterrupt

    with machine.take(8):
        with pytest.raises(KeyboardInterrupt):
            acquire(machine.request(1), machine.probe, listen)
        assert list((machine.locks / "queue").iterdir()) == []
    first, second = (seconds for seconds, _ in told)
    assert 1 <= first < second
    assert second - first >= 1
    assert all("held by" in text for text in told[0][1])
    machine.take(8, lock_timeout=0).release()


def test_more_gpus_than_there_are_or_one_that_is_gone_is_said_at_once(machine: Machine) -> None:
    with pytest.raises(MachineError, match="needs 9 GPUs and may use 8"):
        machine.take(9)
    with pytest.raises(MachineError, match="may use 1 of this machine's; not there any more: GPU-lost"):
        machine.take(2, allowed=("GPU-lost", machine.uuids[0]))


def test_choice_keeps_to_one_numa_node_and_the_order_of_preference(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "8xsm120")
    with machine.take(2), machine.take(4) as wide:
        assert [gpu.index for gpu in wide.gpus] == [4, 5, 6, 7]
        with machine.take(1, allowed=tuple(reversed(machine.uuids))) as preferred:
            assert [gpu.index for gpu in preferred.gpus] == [3]


def test_gpu_used_without_a_lease_is_not_chosen_while_others_will_do(machine: Machine) -> None:
    sim.mark_foreign(machine.folder, machine.uuids[0], 4_000_000, 20 * GIB)
    with machine.take(7) as lease:
        assert [gpu.index for gpu in lease.gpus] == list(range(1, 8))
        with pytest.raises(MachineError, match=r"pid 4000000 \(not visible from here\) 20.0 GiB on GPU 0, without a l"):
            machine.take(1, lock_timeout=0)


def test_gate_waits_until_foreign_memory_is_gone(machine: Machine) -> None:
    uuid = machine.uuids[0]
    sim.hold(machine.folder, uuid, 20 * GIB, time.monotonic() + 0.5)
    with machine.take(8) as lease:
        assert lease.free()
        assert machine.probe.read(uuid).memory_used == 615 << 20


def test_gate_gives_up_naming_the_user_of_the_gpu_and_leaves_it(machine: Machine) -> None:
    sim.charge(machine.folder, machine.uuids[3], os.getpid(), 76 * GIB)
    with pytest.raises(MachineError) as failure:
        machine.take(8, admission_timeout=0)
    assert f"pid {os.getpid()} (" in str(failure.value)
    assert "76.0 GiB on GPU 3" in str(failure.value)
    assert "gpuserve reap" in str(failure.value)
    assert holders(machine.locks) == []
    sim.charge(machine.folder, machine.uuids[3], os.getpid(), 0)
    machine.take(8, admission_timeout=0).release()


def test_busy_names_what_still_holds_the_gpus(machine: Machine) -> None:
    with machine.take(2) as lease:
        sim.charge(machine.folder, machine.uuids[1], os.getpid(), 76 * GIB)
        (text,) = lease.busy()
        assert text.startswith(f"pid {os.getpid()} (")
        assert text.endswith(") 76.0 GiB on GPU 1")
        sim.charge(machine.folder, machine.uuids[1], os.getpid(), 0)
        sim.hold(machine.folder, machine.uuids[0], GIB, None)
        assert lease.busy() == ["1.6 GiB in use on GPU 0, idle is 0.6 GiB, no process has it"]
        sim.fail(machine.folder, "GPU is lost")
        assert len(lease.busy()) == 2
        assert not lease.free()


def test_without_process_lists_memory_decides_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1xsm90", processes=False)
    with machine.take() as lease:
        assert lease.unchecked == ["processes of GPU 0 (the driver lists none)"]
        sim.charge(machine.folder, machine.uuids[0], os.getpid(), 5 * GIB)
        assert lease.busy() == ["5.6 GiB in use on GPU 0, idle is 0.6 GiB, no process is listed"]


def test_without_memory_figures_processes_decide_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1xsm121")
    with machine.take() as lease:
        assert lease.idle == {machine.uuids[0]: None}
        assert lease.unchecked == ["memory of GPU 0 (the driver has no figure)"]
        sim.charge(machine.folder, machine.uuids[0], os.getpid(), 5 * GIB)
        (text,) = lease.busy()
        assert text.startswith(f"pid {os.getpid()} (")


def test_cpus_are_one_lease_for_the_machine(tmp_path: Path) -> None:
    probe = CpuProbe()
    request = replace(
        Machine(tmp_path, "1xsm90").request(), allowed=("CPU",), probe=probe.spec(), lock_timeout=0, holder="cpu-x"
    )
    with acquire(request, probe, lambda *_: None) as lease:
        assert lease.free()
        assert len(lease.unchecked) == 2
        with pytest.raises(MachineError, match=r"the CPUs: held by .*, cpu-x, phase leased"):
            acquire(request, probe, lambda *_: None)
    acquire(request, probe, lambda *_: None).release()


def test_quarantine_lasts_as_long_as_the_gpu_is_not_free(machine: Machine) -> None:
    uuid = machine.uuids[2]
    with machine.take(8) as lease:
        sim.hold(machine.folder, uuid, 76 * GIB, None)
        lease.quarantine(uuid, "leak after sm90-x-baseline")
    (reason,) = quarantined(machine.locks).values()
    assert reason.startswith("leak after sm90-x-baseline; 76.6 GiB in use on GPU 2, idle is 0.6 GiB, no process has it")
    with machine.take(7) as others:
        assert 2 not in [gpu.index for gpu in others.gpus]
    with pytest.raises(MachineError, match="GPU 2 is quarantined: leak after sm90-x-baseline"):
        machine.take(1, allowed=(uuid,), admission_timeout=0)
    assert uuid in quarantined(machine.locks)
    sim.clear(machine.folder, uuid)
    with machine.take(1, allowed=(uuid,)):
        assert quarantined(machine.locks) == {}


def test_nvml_that_fails_makes_a_gpu_not_free_and_that_ends_with_the_failure(machine: Machine) -> None:
    sim.fail(machine.folder, "GPU is lost", machine.uuids[0])
    with machine.take(1) as lease:
        assert [gpu.index for gpu in lease.gpus] != [0]
    with pytest.raises(MachineError, match=r"GPU 0 cannot be read: .*GPU is lost"):
        machine.take(8, admission_timeout=0)
    sim.fail(machine.folder, None, machine.uuids[0])
    machine.take(8).release()


@pytest.mark.parametrize("pid_of_note", [4_000_000, os.getpid()], ids=["gone", "used-again"])
def test_stale_note_with_a_pid_that_is_gone_or_used_again_stops_nobody(machine: Machine, pid_of_note: int) -> None:
    machine.take(1).release()
    note = Note.of_this_process(
        uuid=machine.uuids[0], index=0, lease="run0-dead", run_id="run0", cell="old", phase="serving"
    )
    write_note(machine.locks, replace(note, pid=pid_of_note, start=17, pids=((pid_of_note, 17),)))
    (stale,) = holders(machine.locks)
    assert stale.stale is not None
    with machine.take(8) as lease:
        current = read_note(machine.locks, machine.uuids[0])
        assert current is not None
        assert (current.lease, current.orphans, current.pids) == (lease.id, (), ())
    assert holders(machine.locks) == []


def test_clock_set_back_in_mid_wait_changes_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    with machine.take(8):
        began = time.monotonic()
        with pytest.raises(MachineError):
            machine.take(1, lock_timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 20


def test_lock_that_is_a_symlink_or_unreachable_is_an_error_with_the_path(machine: Machine, tmp_path: Path) -> None:
    machine.take(1).release()
    lock = next(machine.locks.glob(f"{machine.uuids[0]}.lock"))
    lock.unlink()
    (tmp_path / "target").touch()
    lock.symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match=f"{lock} is not a plain file"):
        machine.take(1)


def test_disk_that_fails_while_the_note_is_written_is_an_error_with_nothing_held(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leases, "write_note", full)
    with pytest.raises(MachineError, match=r"lock directory .* failed: .*No space left on device"):
        machine.take(3)
    monkeypatch.undo()
    with machine.take(8, lock_timeout=0) as lease:
        monkeypatch.setattr(leases, "write_note", full)
        lease.note(phase="weights")
        monkeypatch.undo()
