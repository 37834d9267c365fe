"""Whoever dies, nothing is left: worker, supervisor, both, and what else may happen to them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.reap import find_leftovers, reap

from .supervised import Bench, eventually


@pytest.mark.parametrize("faults", [("scheduler",), ("deaf", "scheduler"), ("escape",)])
def test_kill_9_of_the_worker(bench: Bench, faults: tuple[str, ...]) -> None:
    worker = bench.worker(*faults)
    bench.hear(worker, "ready")
    worker.kill()
    worker.wait()
    bench.assert_clean()


def test_kill_9_of_the_worker_during_start_up(bench: Bench) -> None:
    worker = bench.worker("importing=300")
    bench.hear(worker, "spawned")
    worker.kill()
    worker.wait()
    bench.assert_clean()


def test_a_forked_child_that_keeps_the_pipe_open_does_not_keep_the_server(bench: Bench) -> None:
    worker = bench.worker(
        then="pid = os.fork()\nif pid: print(json.dumps({'event': 'forked', 'pid': pid}), flush=True)\ntime.sleep(600)"
    )
    child = bench.hear(worker, "forked")["pid"]
    worker.kill()
    worker.wait()
    bench.assert_clean()
    os.kill(child, signal.SIGKILL)


def test_the_end_of_any_owner_ends_everything(bench: Bench) -> None:
    """After kill -9 of the xdist controller a busy worker lived on for 17 s."""
    with subprocess.Popen(["sleep", "600"]) as controller:
        supervisor = bench.supervisor()
        supervisor.lease(bench.request(owners=(os.getpid(), controller.pid)))
        supervisor.launch(bench.spec("scheduler"))
        controller.kill()
    eventually(lambda: supervisor.verdict(0.1))
    assert not supervisor.alive
    bench.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_supervisor_stop_and_release(bench: Bench, number: signal.Signals) -> None:
    supervisor = bench.serving("scheduler")
    os.kill(supervisor.pid, number)
    eventually(lambda: list(supervisor.events(0.2)) and any(e["event"] == "released" for e in bench.events))
    bench.assert_clean()


def test_an_interrupt_is_not_for_the_supervisor(bench: Bench) -> None:
    supervisor = bench.serving()
    os.kill(supervisor.pid, signal.SIGINT)
    assert supervisor.verdict(0.5) is None
    assert supervisor.stop()["event"] == "stopped"


@pytest.mark.parametrize("faults", [("scheduler", "deaf"), ("escape",)])
def test_kill_9_of_the_supervisor(bench: Bench, faults: tuple[str, ...], reaping: None) -> None:
    supervisor = bench.serving(*faults)
    os.kill(supervisor.pid, signal.SIGKILL)
    answer = supervisor.stop()
    assert answer["event"] == "error"
    assert answer["failure"]["kind"] == "infra"
    assert f"pid {supervisor.pid}" in answer["failure"]["message"]
    assert supervisor.lease(bench.request())["event"] == "error"
    bench.assert_clean()


def test_kill_9_of_the_supervisor_leaves_no_shared_memory(bench: Bench, reaping: None) -> None:
    name = f"gpuserve-test-{os.getpid()}y"
    supervisor = bench.leased()
    try:
        supervisor.launch(bench.spec(f"shm={name}"))
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.stop()
        assert not Path(f"/dev/shm/{name}-mapped").exists()
        assert Path(f"/dev/shm/{name}-stranger").exists()
    finally:
        for path in Path("/dev/shm").glob(f"{name}*"):
            path.unlink()


def test_kill_9_of_the_supervisor_during_start_up(bench: Bench, reaping: None) -> None:
    supervisor = bench.leased()
    supervisor.on_event = lambda event: event["event"] == "spawned" and os.kill(supervisor.pid, signal.SIGKILL)
    bench_event = supervisor.launch(bench.spec("importing=300"))
    assert bench_event["failure"]["kind"] == "infra"
    bench.assert_clean()


def test_a_wedged_supervisor_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch, reaping: None) -> None:
    supervisor = bench.serving("scheduler")
    # Only now: a second is too short for a supervisor that a busy machine starts.
    monkeypatch.setattr("pytest_gpuserve.serve.client._SILENCE", 1.0)
    os.kill(supervisor.pid, signal.SIGSTOP)
    answer = supervisor.stop()
    assert "said nothing" in answer["failure"]["message"]
    bench.assert_clean()


def test_a_supervisor_that_not_even_sigkill_ends_holds_nobody_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reaping: None
) -> None:
    """As one in a call into a driver that does not answer: its server is ended, and the run goes on."""
    supervisor = bench.serving("scheduler")
    monkeypatch.setattr("pytest_gpuserve.serve.client._SILENCE", 1.0)
    monkeypatch.setattr("pytest_gpuserve.serve.client._KILLED", 0.2)
    monkeypatch.setattr(supervisor._process, "send_signal", lambda number: None)
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        answer = supervisor.stop()
        assert answer["failure"]["kind"] == "infra"
        assert f"pid {supervisor.pid}" in answer["failure"]["message"]
        assert "not even SIGKILL ends it" in answer["failure"]["message"]
    finally:
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor._process.wait()
    bench.assert_clean()


def test_both_die_and_reap_ends_what_is_left(bench: Bench, reaping: None) -> None:
    worker = bench.worker("escape", "scheduler")
    bench.hear(worker, "ready")
    supervisor = next(e["pid"] for e in bench.events if e["event"] == "hello")
    # Stopped first: it would begin to tidy up, were this process not the next to run after the first kill.
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    worker.wait()
    eventually(lambda: bench.held() == [])
    ours = [item for item in find_leftovers(bench.locks) if item.run_id == bench.run_id]
    assert any("escapee" in item.what for item in ours)
    assert all("is gone" in item.what for item in ours)
    gone, left = reap(bench.locks)
    assert any(item.run_id == bench.run_id for item in gone)
    assert [item for item in left if item.run_id == bench.run_id] == []
    bench.assert_clean()


def test_reap_leaves_a_living_run_alone(bench: Bench, reaping: None) -> None:
    supervisor = bench.serving("escape")
    assert [item for item in find_leftovers() if item.run_id == bench.run_id] == []
    reap()
    assert supervisor.verdict(0.5) is None
    assert len(bench.marked()) >= 3


def test_a_busy_gpu_is_infra_and_names_the_holder(bench: Bench) -> None:
    bench.leased(count=2)
    other = bench.supervisor()
    began = time.monotonic()
    answer = other.lease(bench.request(lock_timeout=1.5))
    assert answer["event"] == "error"
    assert answer["failure"]["kind"] == "infra"
    assert "a-cell" in answer["failure"]["message"]
    assert 1.0 < time.monotonic() - began < 30
    assert any(event["event"] == "waiting" and event["holders"] for event in bench.events)


def test_waiting_for_a_lease_ends_with_its_owner(bench: Bench) -> None:
    bench.leased(count=2)
    with subprocess.Popen(["sleep", "600"]) as owner:
        other = bench.supervisor()
        other._send({"cmd": "lease", "request": bench.request(lock_timeout=600, owners=(owner.pid,)).to_json()})
        eventually(lambda: any(event["event"] == "waiting" for event in other.events(0.2)))
        owner.kill()
    eventually(lambda: other.verdict(0.1))


def test_nonsense_is_refused_and_changes_nothing(bench: Bench) -> None:
    supervisor = bench.leased()
    supervisor._commands.write(b"this is no JSON\n{}\n[1]\n")
    supervisor._send({"cmd": "dance"})
    supervisor._send({"cmd": "launch", "spec": {"cell": 3}})
    errors: list[dict] = []
    eventually(lambda: errors.extend(supervisor.events(0.1)) or len(errors) >= 5)
    assert {error["failure"]["kind"] for error in errors} == {"infra"}
    assert supervisor.launch(bench.spec())["event"] == "ready"
    assert supervisor.launch(bench.spec())["event"] == "error"
    assert supervisor.lease(bench.request())["event"] == "error"
    assert supervisor.stop()["event"] == "stopped"
    assert supervisor.stop()["teardown"]["rungs"] == []


def test_what_was_read_is_kept_when_its_listener_is_interrupted(bench: Bench) -> None:
    supervisor = bench.supervisor()
    supervisor._send({"cmd": "nonsense"})
    eventually(lambda: waiting(supervisor.fileno()) > 200)  # the first event and the answer

    def interrupted(event: dict[str, object]) -> None:
        raise KeyboardInterrupt

    supervisor.on_event = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(supervisor.events())
    assert [event["event"] for event in supervisor.events()] == ["hello", "error"]
    supervisor.on_event = None


def waiting(fd: int) -> int:
    """The bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_close_may_come_at_any_time_and_twice(bench: Bench) -> None:
    supervisor = bench.serving("scheduler")
    supervisor.close()
    supervisor.close()
    assert not supervisor.alive
    bench.assert_clean(0.5)


def test_a_forked_child_that_keeps_the_pipe_open_does_not_delay_the_close(bench: Bench) -> None:
    supervisor = bench.serving("scheduler")
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    began = time.monotonic()
    supervisor.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert time.monotonic() - began < 60  # of the 180 s after which it is killed
    assert bench.of("released")["quarantined"] == []
    bench.assert_clean(0.5)


def test_main_dies_with_the_supervisor_even_if_nobody_else_acts(bench: Bench, reaping: None) -> None:
    """The parent-death signal of the shim, by itself."""
    worker = bench.worker()
    bench.hear(worker, "ready")
    os.kill(worker.pid, signal.SIGSTOP)
    main = procs.read_stat(bench.of("spawned")["pid"])
    assert main
    os.kill(next(e["pid"] for e in bench.events if e["event"] == "hello"), signal.SIGKILL)
    eventually(lambda: procs.is_alive(f"{main.pid}:{main.started}:{procs.process.pid_namespace()}") is False)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    reap()  # its folder
