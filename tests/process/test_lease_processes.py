"""Leases between processes and users: real ones that compete, die, fork and leave children behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve.gpu import process, sim
from pytest_gpuserve.gpu.lease import holders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEER = Path(__file__).with_name("lease_peer.py")
ROOT = PEER.parents[2]
OTHER_USER = 65534
LIMIT = 60.0
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


class Peer:
    """A `lease_peer.py` process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.locks = folder / "locks"
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(folder / "sim"), str(self.locks), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.pid = self.expect("ready")["pid"]

    def send(self, do: str, **facts: Any) -> None:
        assert self.process.stdin
        print(json.dumps({"do": do, **facts}), file=self.process.stdin, flush=True)

    def next(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        return dict(json.loads(line))

    def expect(self, event: str) -> dict[str, Any]:
        while (found := self.next())["event"] != event:
            assert found["event"] in {"asking", "waiting"}, found
        return found

    def take(self, count: int = 1, **facts: Any) -> dict[str, Any]:
        self.send("take", count=count, **facts)
        return self.expect("leased")

    def refused(self, count: int = 1, **facts: Any) -> dict[str, Any]:
        self.send("take", count=count, **facts)
        return self.expect("error")

    def child(self, how: str) -> int:
        self.send(how)
        return int(self.expect("child")["pid"])

    def release(self) -> None:
        self.send("release")
        self.expect("released")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A simulated machine of eight GPUs that other users can reach (pytest's own folders are private)."""
    path = Path(tempfile.mkdtemp(prefix="lease-test-"))
    path.chmod(0o755)
    sim.create(path / "sim", "8xsm120")
    (path / "locks").mkdir()
    (path / "locks").chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def peer(folder: Path) -> Iterator[Callable[..., Peer]]:
    """Starts peers, and ends them and the children they named."""
    started: list[Peer] = []

    def start(*arguments: str) -> Peer:
        started.append(Peer(folder, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        assert one.process.stdin and one.process.stdout  # noqa: PT018
        one.process.stdin.close()
        one.process.stdout.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def tickets(folder: Path) -> int:
    return len(list((folder / "locks" / "queue").glob("*.ticket")))


def test_second_run_waits_is_told_who_holds_and_gets_the_gpus_when_they_are_given_up(
    peer: Callable[..., Peer],
) -> None:
    first, second = peer(), peer()
    first.take(8, holder="sm120-a")
    second.send("take", count=1)
    waiting = second.expect("waiting")
    assert len(waiting["holders"]) == 8
    assert f"pid {first.pid}, sm120-a, phase leased" in waiting["holders"][0]
    first.release()
    assert second.expect("leased")["gpus"] == [0]
    second.send("look")
    (text,) = second.expect("holders")["texts"]
    assert f"pid {second.pid}" in text


def test_kill_9_of_the_holder_frees_the_gpus_and_its_note_is_stale(folder: Path, peer: Callable[..., Peer]) -> None:
    first, second = peer(), peer()
    first.take(8)
    first.kill()
    found = holders(folder / "locks")
    assert [holder.held for holder in found] == [False] * 8
    assert all(holder.stale for holder in found)
    second.take(8, lock_timeout=0.0)
    assert all(holder.held and holder.stale is None for holder in holders(folder / "locks"))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_child_of_a_killed_holder_keeps_no_lock(folder: Path, peer: Callable[..., Peer], how: str) -> None:
    first = peer()
    first.take(8)
    child = first.child(how)
    try:
        assert all(holder.held for holder in holders(folder / "locks"))
        first.kill()
        # A forked child closes what it inherited when it first runs, which the machine decides.
        until(lambda: not any(holder.held for holder in holders(folder / "locks")))
        assert process.is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_child_that_ends_does_not_give_up_its_parents_lock(folder: Path, peer: Callable[..., Peer]) -> None:
    first = peer()
    first.take(8)
    child = first.child("fork")
    os.kill(child, signal.SIGKILL)
    until(lambda: not process.is_alive(child))
    assert all(holder.held for holder in holders(folder / "locks"))


def test_gate_refuses_while_a_server_of_a_killed_holder_lives_and_remembers_it(
    folder: Path, peer: Callable[..., Peer]
) -> None:
    first, second, third = peer(), peer(), peer()
    first.take(8)
    orphan = first.child("spawn")
    try:
        first.kill()
        for attempt in (second, third, second):
            message = attempt.refused(1, admission_timeout=0.2)["message"]
            assert f"pid {orphan} (" in message
            assert "left by an earlier lease" in message
        third.send("take", count=8)
        until(lambda: any(holder.note and holder.note.pid == third.pid for holder in holders(folder / "locks")))
    finally:
        os.kill(orphan, signal.SIGKILL)
    third.expect("leased")
    assert all(holder.note and not holder.note.orphans for holder in holders(folder / "locks"))


def test_server_whose_mark_cannot_be_read_is_found_by_the_pid_in_the_note(peer: Callable[..., Peer]) -> None:
    first, second = peer(), peer()
    first.take(1)
    child = first.child("fork")  # no mark in its environment, as if it were another user's
    try:
        first.send("note", pids=[child])
        first.expect("noted")
        first.kill()
        assert f"pid {child} (" in second.refused(8, admission_timeout=0.0)["message"]
        assert second.take(7)["gpus"] == [1, 2, 3, 4, 5, 6, 7]
    finally:
        os.kill(child, signal.SIGKILL)
    second.take(1)


@pytest.mark.parametrize("processes", [2, 8])
def test_no_gpu_is_ever_had_by_two_and_nobody_is_left_waiting(
    folder: Path, peer: Callable[..., Peer], processes: int
) -> None:
    peers = [peer() for _ in range(processes)]
    rounds = 48 // processes
    for seed, one in enumerate(peers):
        one.send("churn", widths=[1, 1, 2, 3, 8], rounds=rounds, seed=seed)
    for one in peers:
        assert one.expect("churned")["served"] == rounds
    assert holders(folder / "locks") == []
    assert tickets(folder) == 0


def test_wide_request_is_served_while_narrow_ones_never_stop_coming(folder: Path, peer: Callable[..., Peer]) -> None:
    stop = folder / "stop"
    narrow, wide = [peer() for _ in range(5)], peer()
    for seed, one in enumerate(narrow):
        # Long holds and no gaps: the GPUs are never all free by chance.
        one.send("churn", widths=[1], rounds=1_000_000, seed=seed, hold=0.1, stop=str(stop))
    until(lambda: len(holders(folder / "locks")) > 3)
    for _ in range(3):
        assert wide.take(8, lock_timeout=20)["gpus"] == list(range(8))
        wide.release()
    stop.touch()
    assert all(one.expect("churned")["served"] > 0 for one in narrow)


def test_narrow_request_behind_a_wide_one_waits_its_turn_but_one_for_other_gpus_does_not(
    folder: Path, peer: Callable[..., Peer]
) -> None:
    uuids = [gpu.uuid for gpu in sim.SimProbe(folder / "sim").gpus()]
    holder, wide, narrow, other = peer(), peer(), peer(), peer()
    holder.take(1)
    wide.send("take", count=4, allowed=uuids[:4])
    until(lambda: tickets(folder) == 1)
    narrow.send("take", count=1, allowed=uuids[:4])
    until(lambda: tickets(folder) == 2)
    assert other.take(1, allowed=uuids[3:])["gpus"] == [4]
    holder.release()
    assert wide.expect("leased")["gpus"] == [0, 1, 2, 3]
    wide.release()
    narrow.expect("leased")


def test_waiter_that_is_killed_makes_room_for_those_behind_it(folder: Path, peer: Callable[..., Peer]) -> None:
    holder, wide, narrow = peer(), peer(), peer()
    holder.take(1)
    wide.send("take", count=8)
    until(lambda: tickets(folder) == 1)
    narrow.send("take", count=1)
    until(lambda: tickets(folder) == 2)
    wide.kill()
    narrow.expect("leased")
    assert tickets(folder) == 0


@as_root
def test_two_users_compete_for_the_same_gpus(folder: Path, peer: Callable[..., Peer]) -> None:
    ours, theirs = peer(), peer(str(OTHER_USER))
    ours.take(8)
    theirs.send("take", count=8)
    assert "held by root" in theirs.expect("waiting")["holders"][0]
    ours.release()
    theirs.expect("leased")
    name = process.user_name(OTHER_USER)
    (holder, *_) = holders(folder / "locks")
    assert (holder.held, holder.stale) == (True, None)
    assert f"held by {name}, pid {theirs.pid}" in str(holder)
    assert f"held by {name}" in ours.refused(1, lock_timeout=0.0)["message"]
    theirs.kill()
    ours.take(8, lock_timeout=0.0)


@as_root
def test_users_churn_together(folder: Path, peer: Callable[..., Peer]) -> None:
    peers = [peer(), peer(str(OTHER_USER)), peer(str(OTHER_USER - 1))]
    (folder / "sim").chmod(0o777)
    for seed, one in enumerate(peers):
        one.send("churn", widths=[1, 4, 8], rounds=15, seed=seed)
    for one in peers:
        assert one.expect("churned")["served"] == 15


@as_root
def test_directory_made_by_another_user_with_a_tight_umask_is_shared(folder: Path, peer: Callable[..., Peer]) -> None:
    (folder / "locks").rmdir()
    folder.chmod(0o777)
    before = os.umask(0o077)
    try:
        theirs, ours = peer(str(OTHER_USER)), peer()
    finally:
        os.umask(before)
    ours.take(1)
    assert "GPU 0: held by root" in theirs.refused(8, lock_timeout=0.0)["message"]
    assert theirs.take(7)["gpus"] == [1, 2, 3, 4, 5, 6, 7]
    theirs.release()
    ours.release()
    theirs.take(8)
    assert ours.refused(1, lock_timeout=0.0)["kind"] == "MachineError"


@as_root
def test_directory_that_another_user_may_not_write_to_is_an_error_with_the_next_step(
    folder: Path, peer: Callable[..., Peer]
) -> None:
    theirs = peer(str(OTHER_USER))
    (folder / "locks").chmod(0o755)
    error = theirs.refused()
    assert error["kind"] == "MachineError"
    assert "owner uid 0, mode 755" in error["message"]
    assert f"chmod 0777 {folder / 'locks'}" in error["message"]
    (folder / "locks").rmdir()
    error = theirs.refused()
    assert "is missing and cannot be made: Permission denied" in error["message"]


@as_root
def test_lock_that_another_account_keeps_to_itself_is_named(folder: Path, peer: Callable[..., Peer]) -> None:
    theirs = peer(str(OTHER_USER))
    (folder / "locks" / "queue.lock").touch(mode=0o600)
    error = theirs.refused()
    assert error["kind"] == "MachineError"
    assert f"chmod 0666 {folder / 'locks' / 'queue.lock'}" in error["message"]


@as_root
def test_dead_lease_of_another_user_is_known_by_its_note(peer: Callable[..., Peer]) -> None:
    ours, theirs = peer(), peer(str(OTHER_USER))
    ours.take(1)
    orphan = ours.child("spawn")
    try:
        ours.send("note", pids=[orphan])
        ours.expect("noted")
        ours.kill()
        assert f"pid {orphan} (" in theirs.refused(8, admission_timeout=0.0)["message"]
    finally:
        os.kill(orphan, signal.SIGKILL)
    theirs.take(8)
