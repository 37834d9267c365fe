"""Who can be killed: pytest, its controller and workers, the supervisor, the server and its schedulers."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpuserve.report.store import read_events

from .run import until
from .scene import ONE
from .table import fault

if TYPE_CHECKING:
    from .run import Run
    from .scene import Scene

__all__ = ["BASELINE", "busy", "phases"]

# The first test is through when the second one begins, which the fault waits for.
BUSY = """
def test_quick(sglang_server): pass
def test_long(sglang_server):
    if sglang_server.cell.is_baseline:
        say("busy")
        time.sleep(120)
"""
BASELINE = ("test_mine.py", "-k", "baseline")


def busy(scene: Scene, *args: str, rules: str = "", tests: str = BUSY) -> Run:
    """A run that has one result and is in the middle of a test."""
    scene.tests(tests)
    run = scene.start(*(args or BASELINE), rules=rules)
    run.until(lambda: scene.heard("busy") and run.checked("test_quick"), "a test runs against the server")
    return run


def _killed(scene: Scene, number: signal.Signals, *, group: bool = False) -> None:
    run = busy(scene)
    run.signal(number, group=group)
    assert run.wait(15) == -number
    assert run.record["complete"] is False
    assert run.checked("test_quick")["outcome"] == "passed"


@fault("kill -9 of pytest")
def kill_pytest(scene: Scene) -> None:
    _killed(scene, signal.SIGKILL)


@fault("SIGTERM to pytest", slow=True)
def terminate(scene: Scene) -> None:
    _killed(scene, signal.SIGTERM)


@fault("SIGHUP to its process group (a dropped ssh)")
def hang_up(scene: Scene) -> None:
    _killed(scene, signal.SIGHUP, group=True)


@fault("Ctrl-C")
def interrupt(scene: Scene) -> None:
    run = busy(scene)
    run.signal(signal.SIGINT, group=True)
    assert run.wait(60) == 2
    assert run.record["complete"] is False
    assert "KeyboardInterrupt" in run.text
    assert run.checked("test_quick")["outcome"] == "passed"


@fault("Ctrl-C twice, the second while the server is being stopped")
def interrupt_twice(scene: Scene) -> None:
    # A server deaf to SIGTERM leaves time for the impatient.
    scene.matrix("limits: {draining: {stall: 2}}")
    run = busy(scene, rules="- {then: {ignore-sigterm: true}}")
    run.signal(signal.SIGINT, group=True)
    run.until(lambda: "draining" in phases(scene), "the server is being stopped")
    run.signal(signal.SIGINT, group=True)
    assert run.wait(60) != 0
    assert run.record["complete"] is False
    assert run.checked("test_quick")["outcome"] == "passed"


@fault("Ctrl-C with xdist", slow=True)
def interrupt_workers(scene: Scene) -> None:
    run = busy(scene, "test_mine.py", "-n", "2", "-k", "baseline or graphs")
    run.signal(signal.SIGINT, group=True)
    assert run.wait(60) == 2
    assert run.record["complete"] is False
    assert run.checked("test_quick")["outcome"] == "passed"


@fault("kill -9 of pytest while its server starts", slow=True)
def kill_pytest_starting(scene: Scene) -> None:
    run = scene.start(*ONE, "--gpu-stall=20", rules="- {then: {phase-seconds: 2}}")
    run.until(lambda: "weights" in phases(scene), "the server loads its weights")
    run.signal(signal.SIGKILL)
    assert run.wait(15) == -signal.SIGKILL
    assert run.outcomes() == {"baseline": "not-run"}


@fault("kill -9 of pytest while it waits for a GPU", gpus=1, slow=True)
def kill_pytest_waiting(scene: Scene) -> None:
    first = busy(scene)
    second = scene.start(*ONE)
    second.until(
        lambda: len(scene.processes("supervisor")) == 2 and list(scene.locks.glob("queue/*.ticket")), "it waits"
    )
    second.signal(signal.SIGKILL)
    assert second.wait(15) == -signal.SIGKILL
    until(lambda: len(scene.processes("supervisor")) == 1, "the waiting supervisor is gone", 15)
    # The one that holds the GPU goes on.
    assert first.code is None
    first.signal(signal.SIGINT, group=True)
    assert first.wait(60) == 2


def phases(scene: Scene) -> set[str]:
    """What the holders' notes say."""
    found = set()
    for note in scene.locks.glob("*.note.json"):
        with suppress(FileNotFoundError):  # its lease has ended meanwhile
            found.add(json.loads(note.read_bytes())["phase"])
    return found


@fault("kill -9 of an xdist worker", slow=True)
def kill_worker(scene: Scene) -> None:
    run = busy(scene, "test_mine.py", "-n", "2", "-k", "baseline or graphs")
    run.remember()
    os.kill(int(scene.heard("busy")), signal.SIGKILL)
    assert run.wait() == 1
    assert run.outcomes() == {"baseline": "infra", "graphs.off": "blocked"}
    assert "crashed while running" in run.message()
    assert run.record["complete"] is True


@fault("kill -9 of the xdist controller while a worker computes", slow=True)
def kill_controller(scene: Scene) -> None:
    computes = BUSY.replace("time.sleep(120)", "sum(0 for _ in range(10**10))")
    run = busy(scene, "test_mine.py", "-n", "1", "-k", "baseline", tests=computes)
    worker = int(scene.heard("busy"))
    run.signal(signal.SIGKILL)
    assert run.wait(15) == -signal.SIGKILL
    # The worker computes on for as long as it likes (17 s, seen), but not with a server.
    until(lambda: not [one for one in scene.processes() if one.ours], "the server is gone", 12)
    assert [one.pid for one in scene.processes("worker")] == [worker], "the worker was busy all the while"
    os.kill(worker, signal.SIGKILL)


@fault("kill -9 of the supervisor")
def kill_supervisor(scene: Scene) -> None:
    tests = BUSY.replace("time.sleep(120)", "sglang_server.generate('x', max_new_tokens=100_000)")
    run = busy(scene, tests=tests)
    victim = scene.kill("supervisor")
    assert run.wait(60) == 1
    assert run.outcomes() == {"baseline": "infra"}
    assert f"the supervisor (pid {victim.pid}, exit -9) is gone" in run.message()


@fault("kill -9 of the server's main process")
def kill_main(scene: Scene) -> None:
    run = busy(scene, *BASELINE, "--gpu-no-control", tests=_ASKS)
    scene.kill("main")
    assert run.wait(60) == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("crash", "serving")
    assert "signal 9" in failure["message"] or "SIGKILL" in failure["message"], failure["message"]


@fault("kill -9 of one scheduler of two")
def kill_scheduler(scene: Scene) -> None:
    scene.matrix(gpus=2)
    run = busy(scene, *BASELINE, "--gpu-no-control", tests=_ASKS)
    victim = scene.kill("scheduler")
    assert run.wait(60) == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("crash", "serving")
    assert f"{victim.pid}" in failure["message"], failure["message"]


_ASKS = BUSY.replace("time.sleep(120)", "sglang_server.generate('x', max_new_tokens=100_000)")


@fault("kill -9 of main while its scheduler imports")
def kill_main_importing(scene: Scene) -> None:
    run = scene.start(*ONE, "--gpu-no-control", "--gpu-stall=20", rules="- {then: {phase-seconds: 2}}")
    # A scheduler has no name and no parent-death signal yet.
    server = run.until(lambda: _importing(scene), "a scheduler imports")
    run.remember()
    os.kill(server, signal.SIGKILL)
    assert run.wait(60) == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("crash", "import")


def _importing(scene: Scene) -> int:
    """Main's pid, once it has a child that is still a nameless Python."""
    for main in scene.processes("main"):
        if any(one.ppid == main.pid and "spawn_main" in one.command for one in scene.processes()):
            return main.pid
    return 0


@fault("a test's forked child keeps the supervisor's pipe open, then kill -9 of pytest")
def forked_child(scene: Scene) -> None:
    forks = BUSY.replace(
        "time.sleep(120)", "child = os.fork()\n        if child: say('child', child)\n        time.sleep(120)"
    )
    run = busy(scene, tests=forks)
    child = int(run.until(lambda: scene.heard("child"), "the child"))
    scene.spared.add(child)
    run.signal(signal.SIGKILL)
    assert run.wait(15) == -signal.SIGKILL
    until(scene.gone, "the server is gone", 15)
    assert child in {one.pid for one in scene.processes()}, "the child lived all the while"
    assert run.folder
    assert read_events(run.folder / "events.jsonl")[-1]["event"] == "check"
