"""Machines that fail, are shared, or whose clock is set."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pytest_gpuserve.gpu import sim
from pytest_gpuserve.gpu.lease import quarantined

from .deaths import BASELINE, busy, phases
from .scene import ONE, ROOT
from .table import fault
from .users import AS_NOBODY, another_user

if TYPE_CHECKING:
    from .run import Run
    from .scene import Scene

__all__: list[str] = []


WAITS = """
def test_quick(sglang_server): pass
def test_long(sglang_server):
    say("busy")
    while not pathlib.Path(SAID, "go").exists(): time.sleep(0.02)
"""


def _waits(scene: Scene) -> str:
    """Tests of which the second ends once the fault says `go`."""
    return WAITS.replace("SAID", repr(str(scene.said)))


@fault("NVML fails while a test runs, and works again", slow=True)
def nvml_fails_for_a_while(scene: Scene) -> None:
    run = busy(scene, *BASELINE, tests=_waits(scene))
    run.remember()
    sim.fail(scene.machine, "Unknown Error")
    (scene.said / "go").touch()
    run.until(lambda: "draining" in phases(scene), "the server is being stopped")
    sim.fail(scene.machine, None)
    assert run.wait(60) == 0
    assert run.outcomes() == {"baseline": "passed"}


@fault("NVML fails while a test runs, for good")
def nvml_fails(scene: Scene) -> None:
    run = busy(scene, *BASELINE, tests=_waits(scene))
    run.remember()
    sim.fail(scene.machine, "Driver/library version mismatch")
    (scene.said / "go").touch()
    assert run.wait(60) == 1
    # Nobody can say whether the GPU is free: no fault of the cell's, and nobody gets the GPU.
    assert run.outcomes() == {"baseline": "infra"}
    assert "GPU 0 cannot be read" in run.message()
    assert "Driver/library version mismatch" in run.message()
    assert "cannot be read" in scene.refusal(scene.gpus[:1])
    sim.fail(scene.machine, None)


@fault("NVML without lists of processes (containers): a server passes", processes=False, slow=True)
def no_process_lists(scene: Scene) -> None:
    run = scene.run(*ONE)
    assert run.outcomes() == {"baseline": "passed"}, run.message()


@fault("NVML without lists of processes: a leak is seen by memory alone", processes=False, gpus=1, slow=True)
def no_process_lists_leak(scene: Scene) -> None:
    run = scene.run(*ONE, rules="- {then: {hold-memory: forever}}")
    assert run.outcomes() == {"baseline": "failed"}
    assert run.cells["baseline"]["failure"]["kind"] == "leak"
    assert "no process is listed" in run.message()
    assert scene.gpus[0] in quarantined(scene.locks)
    sim.clear(scene.machine, scene.gpus[0])


# Two servers on one GPU at once would find the file there.
ALONE = """
def test_alone(sglang_server):
    proof = pathlib.Path(SAID, "owned-" + sglang_server.gpus[0].uuid)
    proof.open("x").close()
    time.sleep(0.3)
    proof.unlink()
"""


def _compete(scene: Scene, *via: tuple[str, ...]) -> None:
    scene.tests(ALONE.replace("SAID", repr(str(scene.said))))
    runs = [scene.start("test_mine.py", "-k", "baseline or graphs", via=one) for one in via]
    assert [run.wait() for run in runs] == [0, 0], [run.text[-1500:] for run in runs]
    for run in runs:
        assert set(run.outcomes().values()) == {"passed"}
        assert _gpus(run) == {scene.gpus[0]}


def _gpus(run: Run) -> set[str]:
    return {gpu["uuid"] for cell in run.cells.values() for gpu in cell["gpus"]}


@fault("two runs compete for one GPU", gpus=1)
def two_runs(scene: Scene) -> None:
    _compete(scene, (), ())


@fault("two users compete for one GPU", gpus=1, missing=another_user, slow=True)
def two_users(scene: Scene) -> None:
    scene.folder.chmod(0o777)
    scene.project.chmod(0o777)
    _compete(scene, (), AS_NOBODY)


@fault("a stranger's process takes the leased GPU's memory while the server runs", gpus=1, slow=True)
def stranger_on_the_gpu(scene: Scene) -> None:
    run = busy(scene, *BASELINE, tests=_waits(scene))
    run.remember()
    stranger = scene.strangers[0]
    sim.charge(scene.machine, scene.gpus[0], stranger.pid, 3 << 30)
    (scene.said / "go").touch()
    assert run.wait(60) == 1
    assert run.cells["baseline"]["failure"]["kind"] == "leak"
    assert f"pid {stranger.pid}" in run.message()
    sim.charge(scene.machine, scene.gpus[0], stranger.pid, 0)


# Runs in every Python of the run that sees PYTHONPATH: the wall clock is an hour early once the file is there.
CLOCK = """
import datetime, os, time
_now, _there = time.time, FILE
def _early(): return _now() - (3600 if os.path.exists(_there) else 0)
time.time = _early
class datetime_(datetime.datetime):
    @classmethod
    def now(cls, tz=None): return datetime.datetime.fromtimestamp(_early(), tz)
datetime.datetime = datetime_
"""


def _clock(scene: Scene, *args: str, first: str) -> Run:
    """A run whose clock is set back while the first test of the first cell runs."""
    patch = scene.folder / "clock"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(CLOCK.replace("FILE", repr(str(scene.said / "back"))))
    scene.tests(
        f"""
        def test_first(sglang_server):
            if sglang_server.cell.is_baseline:
                early = time.time()
                say("back")
                assert time.time() < early - 3000
                {first}
        def test_after(sglang_server): pass
        """
    )
    return scene.run("test_mine.py", *args, env={"PYTHONPATH": f"{patch}:{ROOT}"})


@fault("the clock is set back by an hour in the middle of a run")
def clock(scene: Scene) -> None:
    began = time.monotonic()
    run = _clock(scene, "-k", "baseline or graphs", first="pass")
    took = time.monotonic() - began
    assert run.code == 0, run.text[-2000:]
    assert run.outcomes() == {"baseline": "passed", "graphs.off": "passed"}
    for cell in run.cells.values():
        assert 0 < cell["timings"]["total"] <= took
        assert all(0 <= seconds <= took for seconds in cell["timings"]["phases"].values())


@fault("the clock is set back by an hour, and the budget counts on", slow=True)
def clock_and_budget(scene: Scene) -> None:
    run = _clock(scene, "--gpu-budget", "0.2", first="time.sleep(12)")
    assert run.code == 0, run.text[-2000:]
    assert run.outcomes() == {"baseline": "passed", "attention.flashinfer": "not-run", "graphs.off": "not-run"}
