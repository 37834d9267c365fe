"""Servers that do not come up, and who is blamed: a hang, a compile that is none, a sick GPU, a bad flag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .scene import ONE, cells
from .table import fault

if TYPE_CHECKING:
    from .scene import Scene

__all__: list[str] = []

ALONE = (*ONE, "--gpu-no-control")
HANG = "- {then: {hang: graph-capture}}"


def _capture_hangs(scene: Scene, stall: float, *args: str) -> None:
    run = scene.run(*ALONE, *args, rules=HANG)
    assert run.code == 1
    cell = run.cells["baseline"]
    assert (cell["failure"]["kind"], cell["failure"]["phase"]) == ("hang", "graph-capture")
    took = cell["timings"]["phases"]["graph-capture"]
    # The promise is two seconds more; a busy machine takes some of its own, another limit would be a minute or longer.
    assert stall <= took <= stall + 15, f"the verdict took {took} s"
    message = cell["failure"]["message"]
    assert "weights are loaded, the port never opened" in message, message
    assert "one byte a second" in message, message
    assert "stuck in CUDA graph capture" in message, message
    assert cell["failure"]["evidence"], "there is evidence"


@fault("a hang in graph capture, 4 s stall limit")
def capture_hangs(scene: Scene) -> None:
    # So long that one byte more or less, as a busy machine has it, is still one byte a second.
    scene.matrix("limits: {graph-capture: {stall: 4}}")
    _capture_hangs(scene, 4)


@fault("a hang in graph capture, 20 s stall limit", slow=True)
def capture_hangs_long(scene: Scene) -> None:
    _capture_hangs(scene, 20, "--gpu-stall=20")


def _capture_compiles(scene: Scene, stall: float, *args: str) -> None:
    seconds = stall + 3
    run = scene.run(*ALONE, *args, rules=f"- {{then: {{compile: {{phase: graph-capture, seconds: {seconds}}}}}}}")
    assert run.outcomes() == {"baseline": "passed"}, run.message()
    assert run.cells["baseline"]["timings"]["phases"]["graph-capture"] >= seconds


@fault("a compile in graph capture, 2 s stall limit: no verdict")
def capture_compiles(scene: Scene) -> None:
    # In that phase only: on a busy machine an import may well take two seconds without a sign of life.
    scene.matrix("limits: {graph-capture: {stall: 2}}")
    _capture_compiles(scene, 2)


@fault("a compile in graph capture, 20 s stall limit: no verdict", slow=True)
def capture_compiles_long(scene: Scene) -> None:
    _capture_compiles(scene, 20, "--gpu-stall=20")


@fault("a sick GPU on which everything hangs", slow=True)
def sick_gpu(scene: Scene) -> None:
    scene.matrix("limits: {weights: {stall: 2}}")
    run = scene.run(*cells("baseline", "graphs"), rules="- {when: {gpu: 0}, then: {hang: weights}}")
    assert run.code == 1
    assert run.outcomes() == {"baseline": "infra", "graphs.off": "passed"}
    assert f"hang in weights on GPU 0 ({scene.gpus[0]})" in run.message()
    assert "quarantined for this run" in run.message()
    assert run.cells["graphs.off"]["gpus"][0]["uuid"] == scene.gpus[1]


@fault("a bad flag on a sound GPU", slow=True)
def bad_flag(scene: Scene) -> None:
    scene.matrix("limits: {weights: {stall: 2}}")
    run = scene.run(
        *cells("baseline", "flashinfer"),
        rules="- {when: {attention: flashinfer}, then: {hang: weights}}",
    )
    assert run.code == 1
    assert run.outcomes() == {"baseline": "passed", "attention.flashinfer": "failed"}, run.text[-2000:]
    control = run.cells["attention.flashinfer"]["control"]
    assert (control["cell"], control["outcome"]) == ("sm120-m-baseline", "passed")
    assert "The machine was checked: sm120-m-baseline started and answered" in run.message("attention.flashinfer")
