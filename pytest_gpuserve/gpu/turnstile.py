"""The queue before the locks: GPUs are granted in the order of asking, a wide request not starved by narrow ones.

Every look at the queue happens under one short lock (`queue.lock`). A request that cannot be served leaves a ticket, a
file whose lock it holds: when its process dies, the kernel frees that lock and the ticket counts no more, whatever
container or user it was of. Nobody waits for a GPU while holding one: a request gets all its GPUs at once, so nothing
can deadlock. Free GPUs that an earlier ticket waits for are kept for it; all others may be taken by those behind.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.gpu.lockdir import make_shared
from pytest_gpuserve.gpu.locks import is_held, take
from pytest_gpuserve.gpu.notes import read_json
from pytest_gpuserve.gpu.topology import choose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from filelock import BaseFileLock

    from pytest_gpuserve.model.gpu import Gpu

__all__ = ["Place", "Ticket", "grant"]

# A look at the queue takes about a millisecond: a process that keeps the lock for so long is stopped or swapped out.
_QUEUE_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue: `count` GPUs out of `allowed` (UUIDs, in order of preference)."""

    count: int
    allowed: tuple[str, ...]


def grant(
    earlier: Sequence[Ticket], mine: Ticket, free: Collection[str], avoid: Collection[str], gpus: Mapping[str, Gpu]
) -> tuple[Gpu, ...]:
    """The GPUs that `mine` may take now, empty if it must wait. Pure.

    `free` are the UUIDs whose lock is free. `avoid` are those of them that somebody uses without a lock: they are
    taken only by a request that cannot be served without them. Each of the `earlier` tickets first gets what it would
    choose, or, if that is not yet enough, every free GPU it could use. `gpus` gives the topology.
    """
    left = set(free)
    for ticket in (*earlier, mine):
        usable = [uuid for uuid in ticket.allowed if uuid not in avoid]
        if len(usable) < ticket.count:
            usable = list(ticket.allowed)
        open_now = [uuid for uuid in usable if uuid in left]
        chosen = choose([gpus[uuid] for uuid in open_now if uuid in gpus], ticket.count)
        if ticket is mine:
            return chosen
        left -= {gpu.uuid for gpu in chosen} or set(open_now)
    raise AssertionError("unreachable: mine is the last ticket")


class Place:
    """A request's place in the queue of `lock_dir`. Give it up with `leave`, served or not."""

    def __init__(self, lock_dir: Path, ticket: Ticket) -> None:
        self._ticket = ticket
        self._mutex = lock_dir / "queue.lock"
        self._queue = lock_dir / "queue"
        self._name: str | None = None
        self._lock: BaseFileLock | None = None

    @contextmanager
    def turn(self) -> Iterator[list[Ticket]]:
        """The live tickets before this one, oldest first, while nobody else looks at the queue.

        Draw no lock but the GPUs' own inside, and do nothing slow. MachineError if the queue stays locked.
        """
        with self._alone():
            yield self._earlier()

    def stay(self) -> None:
        """Leave a ticket, at the end of the queue; does nothing if there is one already."""
        if self._lock is not None:
            return
        with self._alone():
            make_shared(self._queue)
            last = max((int(path.name.partition("-")[0]) for path in self._tickets()), default=0)
            self._name = f"{last + 1:09d}-{os.urandom(8).hex()}"
            path = self._queue / f"{self._name}.ticket"
            self._lock = take(path, timeout=1.0)
            path.write_text(json.dumps({"count": self._ticket.count, "allowed": self._ticket.allowed}))

    def leave(self) -> None:
        """Take the ticket back."""
        if self._lock is not None:
            (self._queue / f"{self._name}.ticket").unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        mutex = take(self._mutex, _QUEUE_TIMEOUT)
        if mutex is None:
            raise MachineError(
                f"the queue for the GPUs ({self._mutex}) has been locked for {_QUEUE_TIMEOUT:.0f} s: a process that "
                f"waits for GPUs is stopped (Ctrl-Z, a debugger). `fuser -v {self._mutex}` names it: continue or end it"
            )
        try:
            yield
        finally:
            mutex.release()

    def _tickets(self) -> list[Path]:
        return sorted(path for path in self._queue.glob("*.ticket") if path.name.partition("-")[0].isdigit())

    def _earlier(self) -> list[Ticket]:
        earlier = []
        for path in self._tickets():
            if path.stem == self._name:
                break
            if not is_held(path):
                path.unlink(missing_ok=True)
                continue
            data = read_json(path) or {}
            try:
                earlier.append(Ticket(int(data["count"]), tuple(map(str, data["allowed"]))))
            except (KeyError, TypeError, ValueError):
                continue  # no ticket of ours
        return earlier
