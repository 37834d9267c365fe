"""The end of a server: the ladder, escapees, zombies, files, GPU memory. Real processes, simulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from pytest_gpuserve.gpu import process, sim
from pytest_gpuserve.gpu.lease import quarantined
from pytest_gpuserve.serve import procs

from .supervised import QUICK, Bench, eventually

GIB = 1 << 30


def rungs(stopped: dict) -> list[str]:
    return [rung["rung"] for rung in stopped["teardown"]["rungs"]]


def test_a_willing_server_needs_only_sigterm(bench: Bench) -> None:
    supervisor = bench.serving()
    stopped = supervisor.stop()
    assert rungs(stopped) == ["abort", "term", "memory"]
    assert stopped["teardown"]["exit"] == -signal.SIGTERM
    assert all(rung["alive"] == 0 for rung in stopped["teardown"]["rungs"][1:])


def test_a_server_deaf_to_sigterm_is_killed_after_its_drain_limit(bench: Bench) -> None:
    supervisor = bench.serving("deaf", "scheduler", limits={"draining": {"stall": 30, "total": 1.5}})
    stopped = supervisor.stop()
    assert rungs(stopped) == ["abort", "term", "kill", "memory"]
    assert 1.4 < stopped["teardown"]["rungs"][1]["seconds"] < 15  # its other limits are 30 s
    assert stopped["teardown"]["exit"] == -signal.SIGKILL
    assert bench.of("tick")["phase"] == "draining"


def test_a_child_in_a_session_of_its_own_is_swept(bench: Bench) -> None:
    supervisor = bench.serving("escape")
    stopped = supervisor.stop()
    assert "sweep" in rungs(stopped)
    assert stopped["teardown"]["rungs"][-1]["alive"] == 0


def test_zombies_are_reaped_and_counted(bench: Bench) -> None:
    supervisor = bench.serving("zombies=5")
    assert supervisor.stop()["teardown"]["zombies"] == 5


def test_shared_memory_that_is_ours_goes_and_a_strangers_stays(bench: Bench) -> None:
    name = f"gpuserve-test-{os.getpid()}x"
    stranger = Path("/dev/shm", f"{name}-stranger")
    try:
        supervisor = bench.serving(f"shm={name}")
        pid = bench.of("spawned")["pid"]
        stopped = supervisor.stop()
        assert {f"/dev/shm/{name}-mapped", f"/dev/shm/{name}.{pid}.sem"} <= set(stopped["teardown"]["removed"])
        assert str(stranger) in stopped["teardown"]["leftovers"]
        assert [path.name for path in Path("/dev/shm").glob(f"{name}*")] == [stranger.name]
    finally:
        stranger.unlink(missing_ok=True)


def test_gpu_memory_that_comes_back_late_is_waited_for(bench: Bench) -> None:
    supervisor = bench.serving(release_timeout=30.0)
    sim.hold(bench.machine, bench.uuids[0], 40 * GIB, None)
    main = bench.of("spawned")["pid"]

    def give_back() -> None:
        """A second after the server's end, however long that takes."""
        eventually(lambda: not process.is_alive(main))
        time.sleep(1)
        sim.clear(bench.machine, bench.uuids[0])

    driver = threading.Thread(target=give_back)
    driver.start()
    stopped = supervisor.stop()
    driver.join()
    assert stopped["failure"] is None
    assert 0.1 < stopped["teardown"]["memory_release_seconds"] < 30
    assert supervisor.release()["quarantined"] == []


def test_gpu_memory_that_never_comes_back_is_a_leak(bench: Bench) -> None:
    supervisor = bench.serving(release_timeout=0.5)
    sim.hold(bench.machine, bench.uuids[0], 76 * GIB, None)
    stopped = supervisor.stop()
    assert stopped["failure"]["kind"] == "leak"
    assert "76" in stopped["failure"]["message"]
    assert "GPU 0" in stopped["failure"]["message"]
    assert stopped["teardown"]["memory_release_seconds"] is None
    assert supervisor.release()["quarantined"] == [bench.uuids[0]]
    assert list(quarantined(bench.locks)) == [bench.uuids[0]]


def test_a_foreign_process_on_the_gpu_is_named_and_never_signalled(bench: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        supervisor = bench.serving(release_timeout=600.0)
        sim.charge(bench.machine, bench.uuids[0], stranger.pid, 12 * GIB)
        stopped = supervisor.stop()  # it is not waited for
        assert (stopped["failure"]["kind"], stopped["failure"]["retryable"]) == ("infra", True)
        assert str(stranger.pid) in stopped["failure"]["message"]
        assert stopped["teardown"]["memory_release_seconds"] is not None
        assert any(f"pid {stranger.pid} (" in text for text in stopped["teardown"]["foreign"])
        assert supervisor.release()["quarantined"] == []
        assert quarantined(bench.locks) == {}
        assert stranger.poll() is None
        stranger.kill()


def test_what_the_server_leaves_beside_a_stranger_is_still_its_leak(bench: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        supervisor = bench.serving(release_timeout=0.5)
        sim.charge(bench.machine, bench.uuids[0], stranger.pid, 12 * GIB)
        sim.hold(bench.machine, bench.uuids[0], 40 * GIB, None)
        stopped = supervisor.stop()
        assert stopped["failure"]["kind"] == "leak"
        assert f"pid {stranger.pid} " not in stopped["failure"]["message"]
        assert supervisor.release()["quarantined"] == [bench.uuids[0]]
        stranger.kill()


def test_a_hang_beside_a_stranger_is_not_the_cells(bench: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        supervisor = bench.serving(limits={"serving": QUICK})
        sim.charge(bench.machine, bench.uuids[0], stranger.pid, 12 * GIB)
        assert eventually(lambda: supervisor.verdict(0.1) or any(one["event"] == "stranger" for one in bench.events))
        supervisor.watch(True, certain=True)
        failure = supervisor.verdict(30.0)["failure"]
        assert (failure["kind"], failure["phase"]) == ("infra", "serving")
        assert f"pid {stranger.pid} (" in failure["message"]
        sim.charge(bench.machine, bench.uuids[0], stranger.pid, 0)
        stranger.kill()


def test_a_scheduler_that_dies_is_named(bench: Bench) -> None:
    supervisor = bench.serving("scheduler")
    main = bench.of("spawned")["pid"]
    scheduler = next(stat for stat in map(procs.read_stat, procs.all_pids()) if stat and stat.ppid == main)
    # Only what was seen alive under its name can be missed.
    eventually(lambda: _follows(supervisor.pid, scheduler.pid))
    procs.send_signal(scheduler, signal.SIGKILL)
    failed = supervisor.verdict(30.0)
    assert failed["failure"]["kind"] == "crash"
    assert "sglang::schedul" in failed["failure"]["message"]
    assert str(scheduler.pid) in failed["failure"]["message"]


def _follows(supervisor: int, pid: int) -> bool:
    """Whether a descriptor of the supervisor's stands for that process."""
    for info in Path(f"/proc/{supervisor}/fdinfo").iterdir():
        with suppress(OSError):  # closed meanwhile
            if f"Pid:\t{pid}\n" in info.read_text():
                return True
    return False


def test_main_killed_while_serving(bench: Bench) -> None:
    supervisor = bench.serving("scheduler")
    os.kill(bench.of("spawned")["pid"], signal.SIGKILL)
    failed = supervisor.verdict(30.0)
    assert failed["failure"]["kind"] == "crash"
    assert failed["failure"]["phase"] == "serving"
    stopped = supervisor.stop()
    assert stopped["teardown"]["exit_before"] == -signal.SIGKILL
    assert "kill" in rungs(stopped) or "term" in rungs(stopped)


def test_a_stuck_server_is_a_hang_only_while_it_is_watched(bench: Bench) -> None:
    supervisor = bench.serving(limits={"serving": QUICK})
    assert supervisor.verdict(2.5) is None
    supervisor.watch(True, certain=True)
    failed = supervisor.verdict(30.0)
    assert failed["failure"]["kind"] == "hang"
    assert failed["failure"]["phase"] == "serving"
    # Its end frees the check that waits for an answer.
    eventually(lambda: not Path(f"/proc/{bench.of('spawned')['pid']}/cmdline").read_bytes())
    assert supervisor.stop()["failure"] is None


def test_an_idle_server_without_a_token_counter_is_no_hang(bench: Bench) -> None:
    supervisor = bench.serving("no-metrics", limits={"serving": QUICK})
    supervisor.watch(True)
    assert supervisor.verdict(4.0) is None
    supervisor.watch(False)
