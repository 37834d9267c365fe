"""The xdist scheduler: one cell, one worker.

`--dist loadgroup` does not group with pytest 9.2 and xdist 3.8 (xdist#1386), and re-runs a test that kills its worker
until the restarts are used up (xdist#1371). A worker runs an item only once it knows the next one, so this scheduler
keeps one cell queued ahead of each worker and never withholds: holding cells back would hang the session.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpuserve import schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xdist.workermanage import WorkerController

__all__ = ["CellScheduling"]


class _Unit:
    """A cell's tests, as positions in the collection, and those of them that are still to be run."""

    __slots__ = ("cell", "rank", "todo")

    def __init__(self, cell: str, positions: Sequence[int]) -> None:
        self.cell = cell
        self.rank = positions[0]
        self.todo = deque(positions)


class CellScheduling:
    """Implements `xdist.scheduler.protocol.Scheduling`.

    Cells go out in the order of the collection, which is the launch order: what a cell waits for was sent earlier,
    and every worker works first in, first out, so waiting workers cannot wait for each other in a circle. A cell that
    comes back from a dead worker is not sent behind a later one, which may wait for it.
    """

    def __init__(self, numnodes: int, cell_ids: Mapping[str, object]) -> None:
        self._numnodes = numnodes
        self._cell_ids = cell_ids
        self._collections: dict[WorkerController, list[str]] = {}
        self._units: dict[WorkerController, list[_Unit]] = {}
        self._queue: deque[_Unit] = deque()
        self._collection: list[str] | None = None
        self.dropped: list[str] = []

    @property
    def nodes(self) -> list[WorkerController]:
        """The workers that are alive."""
        return list(self._units)

    @property
    def collection_is_completed(self) -> bool:
        """True once every worker of the start has collected."""
        return len(self._collections) >= self._numnodes

    @property
    def tests_finished(self) -> bool:
        """True if nothing is left to send and every worker is at its last test."""
        if not self.collection_is_completed or self._queue:
            return False
        return all(self._pending(node) < 2 for node in self._units)

    @property
    def has_pending(self) -> bool:
        """True while tests are queued or run."""
        return bool(self._queue) or any(self._pending(node) for node in self._units)

    def _pending(self, node: WorkerController) -> int:
        return sum(len(unit.todo) for unit in self._units[node])

    def add_node(self, node: WorkerController) -> None:
        """A worker is up; it collects next."""
        self._units[node] = []

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """What a worker collected. RuntimeError if it is not what the others did: its positions would be wrong."""
        self._collections[node] = list(collection)
        if self._collection is not None and self._collection != self._collections[node]:
            raise RuntimeError(f"worker {node.gateway.id} collected other tests than the first workers did")

    def schedule(self) -> None:
        """All have collected, or a replacement of a crashed worker has: fill every worker up."""
        if self._collection is None:
            first, *others = self._collections.values()
            if any(other != first for other in others):
                raise RuntimeError("the workers collected different tests")
            self._collection = first
            groups = schedule.group(first, self._cell_ids)
            self._queue.extend(_Unit(cell, positions) for cell, positions in groups.items())
        # Round by round, so that the first cells go to different workers.
        for wanted in (1, 2):
            for node in self.nodes:
                self._fill(node, wanted)

    def _fill(self, node: WorkerController, wanted: int = 2) -> None:
        """Up to `wanted` cells on this worker; with nothing left for it, it may run its last test and end."""
        if node.shutting_down or node not in self._collections:
            return
        units = self._units[node]
        while (unit := self._next(units)) is not None and len(units) < wanted:
            self._queue.remove(unit)
            units.append(unit)
            node.send_runtest_some(list(unit.todo))
        if unit is None and wanted > 1:
            node.shutdown()

    def _next(self, units: Sequence[_Unit]) -> _Unit | None:
        """The first queued cell that comes later than all of `units`. Another is for the dead worker's replacement."""
        return next((unit for unit in self._queue if not units or unit.rank > units[-1].rank), None)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:  # noqa: ARG002
        """A worker is through with one test."""
        units = self._units[node]
        for unit in units:
            if item_index in unit.todo:
                unit.todo.remove(item_index)
                break
        units[:] = [unit for unit in units if unit.todo]
        self._fill(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """A worker ended. If it died in a test, that test's node id; its cell is not run again, its queue is.

        What is left of the crashed cell is in `dropped`: its server is gone with the worker, and running the cell
        again could kill one worker after the other.
        """
        units = self._units.pop(node)
        if not units:
            return None
        assert self._collection is not None
        running, *queued = units
        crashed, *rest = (self._collection[position] for position in running.todo)
        self.dropped += rest
        self._queue = deque(sorted([*queued, *self._queue], key=lambda unit: unit.rank))
        for other in self.nodes:
            self._fill(other)
        return crashed

    def mark_test_pending(self, item: str) -> NoReturn:
        """Nothing is ever sent twice."""
        raise NotImplementedError

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> NoReturn:
        """Only an answer to `steal`, which is never sent."""
        raise NotImplementedError


def make(config: Any, cell_ids: Mapping[str, object]) -> CellScheduling:
    """The scheduler for `pytest_xdist_make_scheduler`."""
    return CellScheduling(len(config.getvalue("tx")), cell_ids)
