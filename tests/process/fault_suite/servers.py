"""Servers that misbehave: deaf ones, those that leave children, zombies or memory behind, and strange logs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pytest_gpuserve.gpu import sim
from pytest_gpuserve.gpu.lease import quarantined

from .scene import ONE, cells
from .table import fault

if TYPE_CHECKING:
    from .run import Run
    from .scene import Scene

__all__: list[str] = []


def _rungs(run: Run) -> dict[str, int]:
    """The rungs of the teardown: name → processes alive after it."""
    return {rung["rung"]: rung["alive"] for rung in run.cells["baseline"]["teardown"]["rungs"]}


@fault("a server that ignores SIGTERM")
def deaf(scene: Scene) -> None:
    scene.matrix("limits: {draining: {stall: 2}}")
    run = scene.run(*ONE, rules="- {then: {ignore-sigterm: true}}")
    assert run.code == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("hang", "draining")
    assert "did not end on SIGTERM: kill was needed" in failure["message"]
    assert _rungs(run)["kill"] == 0


@fault("a server with a child in another session")
def escapes(scene: Scene) -> None:
    run = scene.run(*ONE, rules="- {then: {escape-session: true}}")
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert _rungs(run)["sweep"] == 0
    assert run.cells["baseline"]["teardown"]["leftovers"] == []


@fault("a server that leaves zombies", slow=True)
def zombies(scene: Scene) -> None:
    run = scene.run(*ONE, rules="- {then: {zombies: 5, escape-session: true}}")
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert run.cells["baseline"]["teardown"]["zombies"] >= 5


@fault("GPU memory that stays for two seconds after the server's end", slow=True)
def late_memory(scene: Scene) -> None:
    run = scene.run(*cells("baseline", "graphs"), rules="- {when: {graphs: 'on'}, then: {hold-memory: 2}}")
    assert run.outcomes() == {"baseline": "passed", "graphs.off": "passed"}
    assert run.cells["baseline"]["teardown"]["memory_release_seconds"] > 1.5


@fault("GPU memory that stays for ever")
def leak(scene: Scene) -> None:
    run = scene.run(
        *cells("baseline", "graphs"), rules="- {when: {graphs: 'on'}, then: {hold-memory: forever, memory-gib: 7}}"
    )
    assert run.code == 1
    assert run.outcomes() == {"baseline": "failed", "graphs.off": "passed"}
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("leak", "stopped")
    assert "7.5 GiB in use on GPU 0" in failure["message"], failure["message"]
    leaked = run.cells["baseline"]["gpus"][0]["uuid"]
    assert run.cells["graphs.off"]["gpus"][0]["uuid"] != leaked
    assert leaked in quarantined(scene.locks)
    # Another run does not get it either while it lasts, and is told why.
    other = scene.run(*ONE)
    assert other.outcomes() == {"baseline": "passed"}
    assert other.cells["baseline"]["gpus"][0]["uuid"] != leaked
    assert "GPU 0 is quarantined: left in use by sm120-m-baseline" in scene.refusal([leaked])
    sim.clear(scene.machine, leaked)


@fault("a server that exits 0 at its start")
def exits_zero(scene: Scene) -> None:
    run = scene.run(*ONE, "--gpu-no-control", rules="- {then: {exit-zero: true}}")
    assert run.code == 1
    failure = run.cells["baseline"]["failure"]
    assert failure["kind"] == "crash"
    assert "the server ended by itself with exit status 0" in failure["message"]


@fault("a gigabyte of log", slow=True)
def flood(scene: Scene) -> None:
    began = time.monotonic()
    run = scene.run(*ONE, rules="- {then: {log: flood}}")
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert len(run.log()) <= 65 << 20
    assert b" bytes of the log are left out here]" in run.log()
    assert time.monotonic() - began < 60


@fault("a log of carriage returns", slow=True)
def carriage_returns(scene: Scene) -> None:
    run = scene.run(*ONE, rules="- {then: {log: no-newline}}")
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert {"weights", "kv-cache", "graph-capture"} <= run.cells["baseline"]["timings"]["phases"].keys()


@fault("a log with invalid UTF-8 and terminal escapes, of a server that crashes")
def binary_log(scene: Scene) -> None:
    crash = "- {then: {log: binary, crash: {phase: weights, text: 'RuntimeError: size mismatch'}}}"
    run = scene.run(*ONE, "--gpu-no-control", rules=crash)
    assert run.code == 1
    failure = run.cells["baseline"]["failure"]
    assert (failure["kind"], failure["phase"]) == ("crash", "weights")
    assert "size mismatch" in failure["message"]
    assert "\x1b" not in run.text
    assert "\x1b" not in failure["message"] + failure["signature"]
    assert b"\x1b[2J" in run.log(), "the log itself is kept as it was written"
