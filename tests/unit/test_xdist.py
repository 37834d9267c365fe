"""The scheduler against workers that behave as xdist's do: an item is run only once the next one is known."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.xdist import CellScheduling


class Worker:
    """A worker's queue, as in xdist.remote: it holds the running item back until it has the next one."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: deque[int] = deque()
        self.shutting_down = False
        self.ran: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def ready(self) -> bool:
        return len(self.queue) >= 2 or (len(self.queue) == 1 and self.shutting_down)


def collection(cells: list[int]) -> list[str]:
    return [f"s.py::test_{number}[c{cell}]" for cell, size in enumerate(cells) for number in range(size)]


def begin(cells: list[int], workers: int) -> tuple[CellScheduling, list[Worker], list[str]]:
    ids = {f"c{cell}": None for cell in range(len(cells))}
    nodeids = collection(cells)
    scheduler = CellScheduling(workers, ids)
    nodes = [Worker(f"gw{number}") for number in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        assert not scheduler.collection_is_completed
        scheduler.add_node_collection(node, nodeids)
    assert scheduler.collection_is_completed
    scheduler.schedule()
    return scheduler, nodes, nodeids


def replace(scheduler: CellScheduling, nodes: list[Worker]) -> None:
    """A worker in the place of a dead one has collected."""
    clone = Worker(f"gw{len(nodes) + 10}")
    nodes.append(clone)
    scheduler.add_node(clone)
    scheduler.add_node_collection(clone, scheduler._collection)
    scheduler.schedule()


def play(
    scheduler: CellScheduling, nodes: list[Worker], pick, crash_at: int = -1, late: int = 0
) -> tuple[list[str], list[int]]:
    """Run everything; at step `crash_at` the picked worker dies in its test, and is replaced `late` steps later.

    The crashed node ids, what was dropped.
    """
    crashed: list[str] = []
    lost: list[int] = []
    step = 0
    while True:
        ready = [node for node in nodes if node.ready]
        if late >= 0 and lost and (step > crash_at + late or not ready):
            replace(scheduler, nodes)
            late = -1
            ready = [node for node in nodes if node.ready]
        if not ready:
            return crashed, lost
        node = pick(ready)
        item = node.queue.popleft()
        if step == crash_at:
            lost.append(item)
            nodes.remove(node)
            crashed.append(scheduler.remove_node(node))
        else:
            node.ran.append(item)
            scheduler.mark_test_complete(node, item)
        step += 1


CELLS = st.lists(st.integers(1, 4), max_size=8)


@settings(max_examples=200)
@given(CELLS, st.integers(1, 4), st.randoms())
def test_everything_runs_once_each_cell_in_one_worker_and_nothing_hangs(cells: list[int], workers: int, random) -> None:
    scheduler, nodes, nodeids = begin(cells, workers)
    play(scheduler, nodes, random.choice)
    ran = sorted(item for node in nodes for item in node.ran)
    assert ran == list(range(len(nodeids)))
    assert all(node.shutting_down for node in nodes)
    assert scheduler.tests_finished
    assert not scheduler.has_pending
    for node in nodes:
        assert node.ran == sorted(node.ran)
        assert scheduler.remove_node(node) is None
    for cell in range(len(cells)):
        mine = {position for position, nodeid in enumerate(nodeids) if nodeid.endswith(f"[c{cell}]")}
        assert sum(bool(mine & set(node.ran)) for node in nodes) == 1


@settings(max_examples=200)
@given(CELLS.filter(bool), st.integers(1, 3), st.integers(0, 12), st.integers(0, 3), st.randoms())
def test_a_crash_costs_its_own_cell_and_no_other(
    cells: list[int], workers: int, crash_at: int, late: int, random
) -> None:
    scheduler, nodes, nodeids = begin(cells, workers)
    everybody = list(nodes)
    crashed, lost = play(scheduler, nodes, random.choice, crash_at, late)
    ran = {item for node in {*everybody, *nodes} for item in node.ran}
    missing = set(range(len(nodeids))) - ran
    if crash_at >= len(nodeids):
        assert not crashed
        assert not missing
        return
    assert crashed == [nodeids[lost[0]]]
    assert {nodeids[item] for item in missing} == {*crashed, *scheduler.dropped}
    assert len({nodeids[item].partition("[")[2] for item in missing}) == 1
    # A later cell may wait for an earlier one, for an hour.
    assert all(node.ran == sorted(node.ran) for node in {*everybody, *nodes})


def test_what_comes_back_from_dead_workers_is_not_sent_behind_a_cell_that_may_wait_for_it() -> None:
    scheduler, (first, second, third), nodeids = begin([1] * 8, 3)
    assert [list(node.queue) for node in (first, second, third)] == [[0, 3], [1, 4], [2, 5]]
    assert scheduler.remove_node(first) == nodeids[0]
    second.queue.popleft()
    scheduler.mark_test_complete(second, 1)
    assert list(second.queue) == [4, 6]
    assert scheduler.remove_node(third) == nodeids[2]
    replace(scheduler, [second])
    clone = scheduler.nodes[-1]
    assert list(clone.queue) == [3, 5]


def test_a_worker_never_holds_more_than_one_cell_ahead() -> None:
    _, nodes, _ = begin([2, 2, 2, 2, 2, 2], 2)
    assert [list(node.queue) for node in nodes] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_worker_that_collected_something_else_is_refused() -> None:
    scheduler, _, nodeids = begin([1, 1], 1)
    stranger = Worker("gw9")
    scheduler.add_node(stranger)
    with pytest.raises(RuntimeError, match="gw9 collected other tests"):
        scheduler.add_node_collection(stranger, nodeids[1:])


def test_nothing_collected_ends_at_once() -> None:
    scheduler, nodes, _ = begin([], 2)
    assert scheduler.tests_finished
    assert all(node.shutting_down for node in nodes)
