"""The sentence: a table of cases."""

# ruff: noqa: E501 (sentences)

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.conclude import Facts, conclusion
from pytest_gpuserve.serve.watch import Activity


def proc(
    name: str,
    *,
    pid: int = 1,
    state: str = "S",
    wchan: str = "0",
    cpu: float = 0.0,
    writes: float = 0.0,
    written: float = 0.0,
) -> Activity:
    return Activity(pid=pid, name=name, state=state, wchan=wchan, cpu=cpu, writes=writes, written=written)


MAIN = proc("main", pid=1)
BEAT = proc("scheduler", pid=2, writes=1.0, written=1.0)
HANG = Facts(phase=Phase.GRAPH_CAPTURE, why="stall", quiet=120.0, limit=120.0, last="GPU memory", port_open=False)

CASES = [
    (
        "the classic: one byte a second",
        replace(HANG, processes=(MAIN, BEAT), utilization=0),
        (
            "weights are loaded, the port never opened, the scheduler has written one byte a second for 120 s with an idle "
            "GPU: stuck in CUDA graph capture"
        ),
    ),
    (
        "two ranks, and py-spy says where",
        replace(
            HANG,
            processes=(MAIN, replace(BEAT, name="scheduler TP0"), replace(BEAT, name="scheduler TP1", pid=3)),
            utilization=0,
            frames=((1, ("accept (socket.py:293)",)), (3, ("capture_one_batch_size (cuda_graph_runner.py:661)",))),
        ),
        (
            "weights are loaded, the port never opened, scheduler TP0 and scheduler TP1 have each written one byte a second for "
            "120 s with an idle GPU: stuck in CUDA graph capture (scheduler TP1 is in capture_one_batch_size "
            "(cuda_graph_runner.py:661))"
        ),
    ),
    (
        "a spin in a collective",
        replace(
            HANG, processes=(MAIN, proc("scheduler TP0", cpu=1.0), proc("scheduler TP1", cpu=0.99)), utilization=100
        ),
        (
            "weights are loaded, the port never opened, scheduler TP0 and scheduler TP1 spin at 100 % CPU and nothing has moved "
            "for 120 s with the GPU at 100 % (a kernel or a collective that never ends): stuck in CUDA graph capture"
        ),
    ),
    (
        "a spin with an idle GPU while importing",
        replace(HANG, phase=Phase.IMPORT, processes=(proc("main", cpu=0.97),), utilization=0),
        ("the main process spins at 97 % CPU and nothing has moved for 120 s with an idle GPU: stuck while importing"),
    ),
    (
        "one process is stopped",
        replace(HANG, phase=Phase.WARMUP, port_open=True, health="503", processes=(MAIN, proc("scheduler", state="T"))),
        (
            "weights are loaded, the port is open and answers 503, the scheduler is stopped (SIGSTOP or a debugger): stuck in "
            "the warm-up request"
        ),
    ),
    (
        "one process is dead",
        replace(HANG, phase=Phase.DIST_INIT, processes=(MAIN, proc("scheduler TP3", state="Z"))),
        "scheduler TP3 is dead and the others wait: stuck in the setup of the process group (NCCL)",
    ),
    (
        "in the driver",
        replace(HANG, phase=Phase.WEIGHTS, processes=(MAIN, proc("scheduler", state="D", wchan="uvm_ioctl"))),
        (
            "the scheduler is in uninterruptible sleep (in uvm_ioctl), in the kernel or its driver: "
            "stuck while loading weights"
        ),
    ),
    (
        "the same line for ever",
        replace(HANG, phase=Phase.DIST_INIT, processes=(MAIN, BEAT), echo="waiting for peer", echoes=240),
        (
            "the log has said nothing new for 120 s but repeated 240 times: 'waiting for peer': stuck in "
            "the setup of the process group (NCCL)"
        ),
    ),
    (
        "everybody sleeps",
        replace(HANG, phase=Phase.DIST_INIT, processes=(MAIN, proc("scheduler", wchan="futex_wait")), utilization=3),
        ("every process has slept for 120 s with an idle GPU: stuck in the setup of the process group (NCCL)"),
    ),
    (
        "nothing is known but the time",
        replace(HANG, phase=Phase.KV_CACHE, port_open=None),
        (
            "weights are loaded, no progress for 120 s (the last was: GPU memory): stuck between weights and graphs (KV cache, "
            "attention backend, autotuning)"
        ),
    ),
    (
        "tokens stand still",
        replace(
            HANG,
            phase=Phase.SERVING,
            quiet=60.0,
            port_open=True,
            health="200",
            in_flight=3,
            processes=(MAIN, proc("scheduler", cpu=1.0)),
        ),
        (
            "the token counter has stood still for 60 s with 3 requests in flight, health still answers 200, the scheduler spins "
            "at 100 % CPU and nothing has moved for 60 s: the engine is wedged"
        ),
    ),
    (
        "ready by its own word only",
        replace(HANG, phase=Phase.READY, port_open=True, health="200", processes=(MAIN,)),
        (
            "the port is open and answers 200, every process has slept for 120 s: it says it is ready but does not answer its "
            "first request"
        ),
    ),
    (
        "not stalled, only late",
        replace(HANG, why="start-timeout", quiet=0.5, limit=600.0, last="disk reads"),
        "it still made progress (disk reads) when its 600 s were over",
    ),
    (
        "the weights of a draft model",
        replace(HANG, phase=Phase.WEIGHTS, draft=True, processes=(MAIN,)),
        (
            "the target model is loaded, every process has slept for 120 s: stuck while loading the draft model's weights"
        ),
    ),
    (
        "a log that does not tell the phase",
        replace(HANG, phase=Phase.IMPORT, blind="--log-level warning", processes=(MAIN,)),
        "every process has slept for 120 s: stuck somewhere in its start",
    ),
    ("it ended by itself: its log says more", replace(HANG, why=""), ""),
]


@pytest.mark.parametrize(("facts", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_sentences(facts: Facts, sentence: str) -> None:
    assert conclusion(facts) == sentence


@pytest.mark.parametrize(
    ("writes", "written", "beats"),
    [
        (1.0, 1.0, True),
        (0.95, 0.95, True),
        (2.0, 16.0, True),
        (0.0, 0.0, False),
        (1.0, 300.0, False),
        (50.0, 50.0, False),
    ],
)
def test_what_a_heartbeat_is(writes: float, written: float, beats: bool) -> None:
    facts = replace(HANG, processes=(MAIN, replace(BEAT, writes=writes, written=written)), utilization=0)
    assert ("has written" in conclusion(facts)) is beats


def test_the_gpu_is_called_idle_only_when_it_is_known() -> None:
    assert "GPU" not in conclusion(replace(HANG, processes=(MAIN, BEAT), utilization=None)).partition(": stuck")[0]
    assert "with the GPU at 40 %" in conclusion(replace(HANG, processes=(MAIN, BEAT), utilization=40))


def test_every_phase_has_a_sentence() -> None:
    for phase in Phase:
        assert conclusion(replace(HANG, phase=phase))
