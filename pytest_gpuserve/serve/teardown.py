"""Ends a server and proves it: no process, no GPU memory, no file of it left. A ladder of rungs, each one timed.

Why a ladder: SIGTERM first, because a server that frees its GPU memory itself is gone in seconds while after SIGKILL
the driver may need minutes (sglang#36605). A ready server's main process is asked alone, as `docker stop` would, and
tells its schedulers; one that is not ready is signalled as a session, because with main killed during imports the
orphaned scheduler went on and took the GPU half a minute later (sglang#31645). Escapees into other sessions are
children the supervisor adopted, or carry its mark. Only processes of these three kinds are ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.gpu.admission import name_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve import procs
from pytest_gpuserve.serve.http import Answer, Exchange
from pytest_gpuserve.serve.litter import remove_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpuserve.serve.server import Server

__all__ = ["tear_down"]

_ABORT = 2.0
# A server that has failed, or whose owner is gone, gets less time than a healthy one's `draining` limit.
_TERM_FAILED = 3.0
_TERM_ABANDONED = 5.0
_KILL = 10.0
_REAP = 2.0
_SETTLE = 0.02
_MEMORY_POLL = 0.1


@dataclass(slots=True)
class _Ending:
    """A teardown under way. `abandoned` tells whether somebody still waits for a gentle end."""

    server: Server
    abandoned: Callable[[], bool]
    release_timeout: float
    rungs: list[dict[str, Any]] = field(default_factory=list)
    reaped: int = 0
    busy: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def alive(self, *, thorough: bool = False) -> list[procs.Stat]:
        """Our processes that still run; zombies of ours are reaped on the way, main excepted."""
        living = []
        for stat in self.server.family.members(thorough=thorough):
            if not stat.zombie:
                living.append(stat)
            elif stat.pid != self.server.pid and stat.ppid == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    self.reaped += os.waitpid(stat.pid, os.WNOHANG)[0] == stat.pid
        return living

    def in_session(self, *, thorough: bool = False) -> list[procs.Stat]:
        """Those of the server's own session."""
        return [stat for stat in self.alive(thorough=thorough) if stat.sid == self.server.pid]

    def wait(self, until: Callable[[], bool], limit: float, *, abandoned: float | None = None) -> bool:
        """Turns the loop until `until()` or the limit, which is `abandoned` seconds once nobody waits for us."""
        began = monotonic()

        def over() -> bool:
            return until() or (abandoned is not None and self.abandoned() and monotonic() - began > abandoned)

        return self.server.loop.wait(over, limit, poll=_SETTLE) and until()

    def rung(self, name: str, climb: Callable[[_Ending], object]) -> None:
        """Takes one rung and notes how long it took and how many processes are alive after it."""
        began = monotonic()
        climb(self)
        self.rungs.append(
            {"rung": name, "seconds": round(monotonic() - began, 3), "alive": len(self.alive(thorough=True))}
        )


def tear_down(server: Server, *, abandoned: Callable[[], bool], release_timeout: float) -> dict[str, Any]:
    """Ends `server`, waits until its GPUs are free, removes its files.

    Returns the fields of the `stopped` event and `quarantined`, a list of UUIDs. The failure is a `leak` if a process
    or GPU memory outlived everything, `infra` if that cannot be told because GPUs cannot be read; then the GPUs
    concerned are quarantined. It is a `retryable` `infra`, and nothing is quarantined, if only others use the GPUs.
    """
    ending = _Ending(server, abandoned, release_timeout)
    exit_before = server.exit
    server.observe_litter()
    server.begin_stop()
    for name, applies, climb in _LADDER:
        if applies(ending):
            ending.rung(name, climb)
    began = monotonic()
    ending.rung("memory", _await_memory)
    released = round(monotonic() - began, 3)
    survivors = ending.alive(thorough=True)
    removed, left = server.shm.clean(server.family.seen.keys()) if not survivors else ([], [])
    if not survivors and remove_folder(server.tmpdir):
        removed.append(server.tmpdir)
    if server.pid not in {stat.pid for stat in survivors}:
        # Last of all: until nobody is left in its session, main's pid must not be given to another process.
        server.loop.wait(lambda: server.exit is not None, _REAP)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server.pid, os.WNOHANG)
    log_error = server.dispose()
    failure, quarantined = _leak(ending, survivors)
    return {
        "teardown": {
            "rungs": ending.rungs,
            "exit": server.exit,
            "exit_before": exit_before,
            "zombies": ending.reaped,
            "leftovers": left + [procs.describe(stat) for stat in survivors],
            "removed": removed,
            "memory_release_seconds": None if ending.busy else released,
            "foreign": ending.foreign,
            "log_error": log_error,
        },
        "failure": failure,
        "quarantined": quarantined,
    }


def _await_memory(ending: _Ending) -> None:
    """Killing only queues the driver's teardown: a pid may stay charged long after it is gone (sglang#39545).

    Other people's processes are not waited for here: the next lease does that.
    """
    deadline = monotonic() + ending.release_timeout
    server = ending.server
    while True:
        ending.busy, ending.foreign = server.lease.occupancy(server.strangers.is_foreign)
        if not ending.busy or monotonic() >= deadline:
            return
        server.loop.wait(lambda: False, _MEMORY_POLL)


def _abort(ending: _Ending) -> None:
    """A drain waits for every running request, without a limit (sglang#1838)."""
    server = ending.server
    answers: list[Answer] = []
    exchange = Exchange(
        server.loop,
        server.port,
        server.endpoints.abort,
        answers.append,
        key=server.api_key,
        body={"abort_all": True},
    )
    ending.wait(lambda: bool(answers) or server.exit is not None, _ABORT)
    exchange.cancel()


def _terminate(ending: _Ending) -> None:
    server = ending.server
    gentle = server.ready and not server.failed and server.exit is None
    targets = ending.in_session()
    _signal([stat for stat in targets if stat.pid == server.pid] if gentle else targets, signal.SIGTERM)
    limits = server.limits[Phase.DRAINING]
    limit = (limits.total or limits.stall) if gentle else _TERM_FAILED

    def over() -> bool:
        stalled = server.status is not None and server.status.phase is Phase.DRAINING and server.status.stall
        return server.exit is not None or bool(stalled)

    if gentle:
        ending.wait(over, limit, abandoned=_TERM_ABANDONED)
    # Main is gone: its children have been told, or die of its death.
    ending.wait(lambda: not ending.in_session(), 1.0 if gentle else limit, abandoned=1.0)


def _kill(ending: _Ending) -> None:
    _insist(ending, lambda: ending.in_session(thorough=True))


def _sweep(ending: _Ending) -> None:
    _insist(ending, lambda: ending.alive(thorough=True))


def _insist(ending: _Ending, who: Callable[[], list[procs.Stat]]) -> None:
    """SIGKILL until nobody is left, because a process may fork while the list is read."""

    def nobody() -> bool:
        left = who()
        _signal(left, signal.SIGKILL)
        return not left

    ending.wait(nobody, _KILL)


def _signal(targets: Iterable[procs.Stat], number: int) -> None:
    for stat in targets:
        procs.send_signal(stat, number)


_LADDER: tuple[tuple[str, Callable[[_Ending], bool], Callable[[_Ending], object]], ...] = (
    ("abort", lambda ending: ending.server.answers and ending.server.ready and not ending.server.failed, _abort),
    ("term", lambda ending: bool(ending.in_session()), _terminate),
    ("kill", lambda ending: bool(ending.in_session(thorough=True)), _kill),
    ("sweep", lambda ending: bool(ending.alive(thorough=True)), _sweep),
)


def _leak(ending: _Ending, survivors: list[procs.Stat]) -> tuple[dict[str, Any] | None, list[str]]:
    """The `leak` or `infra`, if there is one, and the GPUs that were quarantined for it: those not known to be free."""
    lease = ending.server.lease
    cell = ending.server.spec.cell
    if not survivors and not ending.busy:
        return (_not_ours(cell, ending.foreign) if ending.foreign else None), []
    held = [gpu for gpu in lease.gpus if any(_names(text, name_of(gpu)) for text in ending.busy)]
    guilty = (held or list(lease.gpus)) if ending.busy else []
    unknown = not survivors and lease.unreadable()
    for gpu in guilty:
        with contextlib.suppress(OSError):
            lease.quarantine(gpu.uuid, f"{'not proven free after' if unknown else 'left in use by'} {cell}")
    if unknown:
        text = (
            f"whether the server of {cell} left its GPUs free cannot be told {ending.release_timeout:g} s after its "
            f"end: {'; '.join(ending.busy)}. They are quarantined until they can be read and are free"
        )
        failure = Failure.of(Kind.INFRA, Phase.STOPPED, text, line=ending.busy[0])
        return failure.to_json(), [gpu.uuid for gpu in guilty]
    parts = []
    if ending.busy:
        # No count: the signature of a leak is the same whatever the number of GPUs.
        parts.append(f"not free {ending.release_timeout:g} s after the server's end: {'; '.join(ending.busy)}")
    if survivors:
        parts.append(f"not killable: {', '.join(map(procs.describe, survivors))}")
    text = (
        f"the server of {cell} left something behind: {'. '.join(parts)}. "
        "The GPUs named are quarantined until they are free; `gpuserve status` shows them, `nvidia-smi` who uses them"
    )
    return Failure.of(Kind.LEAK, Phase.STOPPED, text, line=parts[0]).to_json(), [gpu.uuid for gpu in guilty]


def _not_ours(cell: str, foreign: list[str]) -> dict[str, Any]:
    """Others use the GPUs, and nothing of the server is left: its measurements may be wrong, but it has not leaked."""
    text = (
        f"a process that is not of the server of {cell} uses its GPUs: {'; '.join(foreign)}. The server itself left "
        "nothing behind. The GPUs are used again once they are free"
    )
    line = "a process that is not the server's used its GPU"
    return Failure.of(Kind.INFRA, Phase.STOPPED, text, line=line, retryable=True).to_json()


def _names(text: str, gpu: str) -> bool:
    return re.search(rf"{re.escape(gpu)}(?!\d)", text) is not None
