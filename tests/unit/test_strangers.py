"""Who used the GPUs beside the server, and what that makes of its failure."""

from __future__ import annotations

import os

import pytest

from pytest_gpuserve.gpu import process
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.gpu import Gpu, GpuProcess, Reading
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.strangers import Stranger, Strangers, disturbed

GIB = 1 << 30
GPU = Gpu(index=3, uuid="GPU-x", name="NVIDIA H200", arch="sm90", memory_total=141 * GIB)
ME = os.getpid()
OURS = {500: 77}
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB."


def reading(*processes: GpuProcess) -> Reading:
    return Reading(uuid="GPU-x", memory_used=100 * GIB, processes=processes)


def strangers() -> tuple[Strangers, list[str]]:
    told: list[str] = []
    return Strangers([GPU], OURS.get, lambda one: told.append(str(one))), told


def stranger(memory: int | None = 84 * GIB) -> Stranger:
    return Stranger(
        pid=9, gpu="GPU 3", who="pid 9 (python, bob)", memory=memory, came=20.4, last=30.0, phase=Phase.WEIGHTS
    )


def test_a_stranger_is_named_once_with_when_it_came_and_the_most_it_had() -> None:
    seen, told = strangers()
    item = GpuProcess(pid=ME, memory=GIB, start=process.start_of(ME))
    for seconds, memory in ((20.0, 84), (21.0, 90), (22.0, 2)):
        seen.see([reading(GpuProcess(pid=ME, memory=memory * GIB, start=item.start))], seconds, Phase.WEIGHTS)
    (one,) = seen.found(25.0, Phase.KV_CACHE)
    assert f"{one}".endswith("with 90.0 GiB on GPU 3, there since 20 s after the launch (weights)")
    assert str(one).startswith(f"pid {ME} (")
    assert len(told) == 1
    assert seen.is_foreign(item)
    assert seen.unchecked() == ""


def test_the_servers_own_processes_are_no_strangers_dead_or_alive() -> None:
    seen, told = strangers()
    for start in (77, None):
        seen.see([reading(GpuProcess(pid=500, memory=GIB, start=start))], 1.0, Phase.WEIGHTS)
        assert not seen.is_foreign(GpuProcess(pid=500, start=start))
    assert (told, seen.found(2.0, Phase.WEIGHTS)) == ([], ())
    # The number was given to another process since.
    assert seen.is_foreign(GpuProcess(pid=500, start=1234))


def test_pids_of_another_namespace_accuse_nobody() -> None:
    """They may be the server's own, under the host's numbers."""
    seen, told = strangers()
    seen.see([reading(GpuProcess(pid=1, memory=75 * GIB))], 5.0, Phase.WEIGHTS)
    assert not seen.is_foreign(GpuProcess(pid=1, memory=75 * GIB))
    assert (told, seen.found(6.0, Phase.KV_CACHE)) == ([], ())
    assert seen.unchecked() == "not checked who held the GPU's memory: its pids (1) cannot be identified from here"
    # The server's own pid stands beside it: they are of this namespace.
    seen.see([reading(GpuProcess(pid=500, start=77), GpuProcess(pid=1, memory=75 * GIB))], 7.0, Phase.WEIGHTS)
    (one,) = seen.found(8.0, Phase.KV_CACHE)
    assert one.who == "pid 1 (not identified: it may be of another PID namespace)"
    assert one.came == 5.0
    assert seen.unchecked() == ""


def test_unlisted_processes_are_not_checked() -> None:
    seen, _ = strangers()
    seen.see([Reading(uuid="GPU-x", memory_used=100 * GIB, processes=None)], 1.0, Phase.WEIGHTS)
    assert seen.unchecked() == "not checked who held memory of GPU 3: the driver lists no processes there"


def test_while_it_serves_only_a_recent_stranger_counts() -> None:
    seen, _ = strangers()
    seen.see([reading(GpuProcess(pid=ME, start=process.start_of(ME)))], 5.0, Phase.WEIGHTS)
    assert seen.found(300.0, Phase.GRAPH_CAPTURE)
    assert not seen.found(300.0, Phase.SERVING)
    assert seen.found(60.0, Phase.SERVING)


@pytest.mark.parametrize(
    ("kind", "phase", "cause", "expected"),
    [
        (Kind.OOM, Phase.KV_CACHE, OUT_OF_MEMORY, Kind.INFRA),
        (Kind.OOM, Phase.SERVING, OUT_OF_MEMORY, Kind.INFRA),
        (Kind.OOM, Phase.WEIGHTS, "MemoryError", Kind.OOM),
        (Kind.CRASH, Phase.GRAPH_CAPTURE, "RuntimeError: CUDA error: out of memory", Kind.INFRA),
        (Kind.CRASH, Phase.WEIGHTS, "ValueError: The memory capacity is unbalanced.", Kind.INFRA),
        (Kind.CRASH, Phase.KV_CACHE, "RuntimeError: Pool is empty", Kind.INFRA),
        (Kind.CRASH, Phase.WEIGHTS, "RuntimeError: Unsupported architecture", Kind.CRASH),
        (Kind.REJECTED, Phase.IMPORT, "ValueError: bad flag", Kind.REJECTED),
        (Kind.HANG, Phase.GRAPH_CAPTURE, "", Kind.INFRA),
        (Kind.INFRA, Phase.SPAWN, "", Kind.INFRA),
    ],
)
def test_what_a_stranger_makes_of_a_failure(kind: Kind, phase: Phase, cause: str, expected: Kind) -> None:
    before = Failure.of(kind, phase, f"it failed: {cause}", text=cause)
    after = disturbed(before, (stranger(),), "", cause)
    assert after.kind is expected
    assert "pid 9 (python, bob) with 84.0 GiB on GPU 3, there since 20 s after the launch (weights)" in after.message
    assert after.retryable is (kind is not expected)
    assert (after.text, after.phase) == (before.text, phase)
    assert disturbed(before, (), "", cause) == before


def test_the_engines_advice_is_not_passed_on() -> None:
    cause = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    failure = Failure.of(Kind.OOM, Phase.KV_CACHE, f"GPU memory ran out in phase kv-cache: {cause}", text=cause)
    assert "mem-fraction" not in disturbed(failure, (stranger(),), "", cause).message
    told = disturbed(failure, (), "not checked who held memory of GPU 3: the driver lists no processes there", cause)
    assert (told.kind, told.retryable) == (Kind.OOM, False)
    assert told.message.endswith("\nNot checked who held memory of GPU 3: the driver lists no processes there.")
