"""From the facts to one sentence, in the words of a person who has seen this before. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.serve.watch import Activity

__all__ = ["Facts", "conclusion"]

_IDLE_GPU = 5
_BUSY_GPU = 90
_SPIN = 0.8
_ASLEEP = 0.05
# A heartbeat: a few writes a second of a few bytes each. A log or a progress bar writes more at a time.
_MOST_WRITES = 5.0
_MOST_BYTES = 16.0

_STUCK = {
    Phase.SPAWN: "the interpreter never started to run",
    Phase.IMPORT: "stuck while importing",
    Phase.DIST_INIT: "stuck in the setup of the process group (NCCL)",
    Phase.WEIGHTS: "stuck while loading weights",
    Phase.KV_CACHE: "stuck between weights and graphs (KV cache, attention backend, autotuning)",
    Phase.GRAPH_CAPTURE: "stuck in CUDA graph capture",
    Phase.WARMUP: "stuck in the warm-up request",
    Phase.READY: "it says it is ready but does not answer its first request",
    Phase.SERVING: "the engine is wedged",
    Phase.DRAINING: "stuck while draining",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the evidence holds. `why` is the stall's (empty: the server did not stall, it ended), `quiet` seconds
    without progress, `limit` what was exceeded, `last` the last progress.

    `port_open` is None if unknown; `health` is the status `/health` answers now, empty if it does not;
    `utilization` the GPUs' highest in percent; `processes` what each did meanwhile; `frames` the main threads'
    innermost frames by pid; `echo` the line that the log repeated `echoes` times. `draft`: the weights are a draft
    model's. `blind` is the flag that keeps the phases out of the log, empty if they are told.
    """

    phase: Phase
    why: str = ""
    quiet: float = 0.0
    limit: float = 0.0
    last: str = ""
    port_open: bool | None = None
    health: str = ""
    utilization: int | None = None
    in_flight: int | None = None
    processes: tuple[Activity, ...] = ()
    frames: tuple[tuple[int, tuple[str, ...]], ...] = ()
    echo: str = ""
    echoes: int = 0
    draft: bool = False
    blind: str = ""


def conclusion(facts: Facts) -> str:
    """One sentence without a full stop; empty if the server ended by itself, which its log explains better."""
    if not facts.why:
        return ""
    if facts.why != "stall" and facts.quiet < 10:
        return f"it still made progress ({facts.last}) when its {facts.limit:.0f} s were over"
    clauses = [*_where(facts), _seen(facts)]
    told = ", ".join(clause for clause in clauses if clause)
    return f"{told}: {_stuck(facts)}{_frame(facts)}"


def _stuck(facts: Facts) -> str:
    if facts.blind and facts.phase in (Phase.SPAWN, Phase.IMPORT):
        return "stuck somewhere in its start"
    if facts.draft:
        return "stuck while loading the draft model's weights"
    return _STUCK.get(facts.phase, f"stuck in phase {facts.phase}")


def _where(facts: Facts) -> list[str]:
    clauses = ["the target model is loaded"] if facts.draft else []
    if Phase.KV_CACHE.rank <= facts.phase.rank < Phase.READY.rank:
        clauses.append("weights are loaded")
    if facts.phase is Phase.SERVING:
        requests = f" with {number(facts.in_flight, 'request')} in flight" if facts.in_flight else ""
        clauses.append(f"the token counter has stood still for {facts.quiet:.0f} s{requests}")
        if facts.health == "200":
            clauses.append("health still answers 200")
    elif facts.port_open is False and facts.phase.rank >= Phase.KV_CACHE.rank:
        clauses.append("the port never opened")
    elif facts.port_open and facts.phase.rank < Phase.SERVING.rank:
        clauses.append(f"the port is open{f' and answers {facts.health}' if facts.health else ''}")
    return clauses


def _seen(facts: Facts) -> str:
    """The one observation that tells most."""
    for rule in (_stopped, _dead, _uninterruptible, _heartbeat, _repeated, _spinning, _asleep):
        told = rule(facts)
        if told:
            return told
    return f"no progress for {facts.quiet:.0f} s{_gpu(facts)} (the last was: {facts.last})"


def _stopped(facts: Facts) -> str:
    stopped = [proc for proc in facts.processes if proc.state in ("T", "t")]
    return f"{_names(stopped)} {_is(stopped)} stopped (SIGSTOP or a debugger)" if stopped else ""


def _dead(facts: Facts) -> str:
    dead = [proc for proc in facts.processes if proc.state in ("Z", "X")]
    return f"{_names(dead)} {_is(dead)} dead and the others wait" if dead and len(dead) < len(facts.processes) else ""


def _uninterruptible(facts: Facts) -> str:
    stuck = [proc for proc in facts.processes if proc.state == "D" and proc.cpu < _ASLEEP]
    if not stuck:
        return ""
    place = next((proc.wchan for proc in stuck if proc.wchan not in ("", "0")), "")
    inside = f" (in {place})" if place else ""
    return f"{_names(stuck)} {_is(stuck)} in uninterruptible sleep{inside}, in the kernel or its driver"


def _heartbeat(facts: Facts) -> str:
    ticking = [
        proc
        for proc in facts.processes
        if 0.2 <= proc.writes <= _MOST_WRITES and 0 < proc.written <= _MOST_BYTES * proc.writes and proc.cpu < _SPIN
    ]
    # An idle main or detokenizer wakes its own event loop with small writes, too: that is no symptom.
    ticking = [proc for proc in ticking if proc.name.startswith(("scheduler", "worker"))]
    if not ticking or facts.echoes:
        return ""
    first = ticking[0]
    has = "has" if len(ticking) == 1 else "have each"
    if round(first.writes) == 1 and first.written / first.writes <= 1.5:
        wrote = "one byte a second"
    else:
        wrote = f"{first.written:.0f} bytes a second in tiny pieces"
    return f"{_names(ticking)} {has} written {wrote} for {facts.quiet:.0f} s{_gpu(facts)}"


def _repeated(facts: Facts) -> str:
    if not facts.echoes:
        return ""
    line = facts.echo if len(facts.echo) <= 120 else f"{facts.echo[:120]} …"
    return f"the log has said nothing new for {facts.quiet:.0f} s but repeated {facts.echoes} times: {line!r}"


def _spinning(facts: Facts) -> str:
    spinning = [proc for proc in facts.processes if proc.cpu >= _SPIN]
    if not spinning:
        return ""
    verb = "spins" if len(spinning) == 1 else "spin"
    told = f"{_names(spinning)} {verb} at {100 * max(proc.cpu for proc in spinning):.0f} % CPU"
    return f"{told} and nothing has moved for {facts.quiet:.0f} s{_gpu(facts)}"


def _asleep(facts: Facts) -> str:
    if not facts.processes or any(proc.cpu >= _ASLEEP for proc in facts.processes):
        return ""
    return f"every process has slept for {facts.quiet:.0f} s{_gpu(facts)}"


def _gpu(facts: Facts) -> str:
    if facts.utilization is None:
        return ""
    if facts.utilization <= _IDLE_GPU:
        return " with an idle GPU"
    if facts.utilization >= _BUSY_GPU:
        return f" with the GPU at {facts.utilization} % (a kernel or a collective that never ends)"
    return f" with the GPU at {facts.utilization} %"


def _frame(facts: Facts) -> str:
    """Where the process of interest stands: SGLang's or FlashInfer's own code says more than torch's."""
    ranked = sorted(facts.processes, key=lambda proc: (not proc.name.startswith("scheduler"), -proc.cpu))
    frames = dict(facts.frames)
    for proc in ranked:
        # Code that was given as text (`<string>`) says nothing; of a real file the innermost frame says most.
        frame = next((frame for frame in frames.get(proc.pid, ()) if ".py" in frame), None)
        if frame:
            return f" ({proc.name} is in {frame})"
    return ""


def _names(processes: Sequence[Activity]) -> str:
    names = ["the main process" if proc.name == "main" else proc.name for proc in processes]
    if len(names) == 1:
        return f"the {names[0]}" if " " not in names[0] else names[0]
    if len(names) <= 3:
        return " and ".join((", ".join(names[:-1]), names[-1]))
    return f"{names[0]} and {number(len(names) - 1, 'other process', 'other processes')}"


def _is(processes: Sequence[Activity]) -> str:
    return "is" if len(processes) == 1 else "are"
