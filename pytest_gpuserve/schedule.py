"""Order of the tests, groups for one worker, and estimates (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pytest_gpuserve.model.cell import Cell

__all__ = [
    "Place",
    "arrange",
    "baseline_of",
    "cell_in",
    "estimate",
    "group",
    "in_launch_order",
    "makespan",
    "shares",
    "without_cell",
]

T = TypeVar("T")
# A start of a real server of a few layers takes about a minute, nearly all of it imports and graph capture.
_START_SECONDS = 90.0
_GPU_SECONDS = 20.0


def baseline_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """The baseline of the cell's model and arch in its matrix; None for a baseline and where there is none."""
    if cell.is_baseline:
        return None
    key = (cell.matrix, cell.arch, cell.model.name)
    return next((one for one in cells if one.is_baseline and (one.matrix, one.arch, one.model.name) == key), None)


def in_launch_order(cells: Sequence[Cell], references: Mapping[str, Iterable[str]] | None = None) -> tuple[Cell, ...]:
    """Cells as they are launched: all baselines, then model by model; what others are compared with before those.

    Baselines first, so that under xdist no worker waits for one while another could be run; so a baseline's own
    references count for nothing here: every delta waits for its baseline.

    `references` maps a cell's id to the ids of cells whose results it needs. Otherwise the order is the given one,
    so that two runs of one matrix are alike. A cycle of references is cut where it closes.
    """
    references = references or {}
    by_id = {cell.id: cell for cell in cells}
    deltas = by_id.keys() - {cell.id for cell in cells if cell.is_baseline}
    models = {key: rank for rank, key in enumerate(dict.fromkeys((cell.arch, cell.model.name) for cell in cells))}
    ranked = sorted(cells, key=lambda cell: (not cell.is_baseline, models[cell.arch, cell.model.name]))
    done: dict[str, Cell] = {}
    for first in ranked:
        # Depth first without recursion: a chain of references may be as long as the matrix.
        stack, open_ = [first.id], {first.id}
        while stack:
            current = stack[-1]
            wanted = references.get(current, ()) if current in deltas else ()
            missing = [one for one in wanted if one in by_id and one not in done and one not in open_]
            if missing:
                stack.append(missing[0])
                open_.add(missing[0])
                continue
            stack.pop()
            done.setdefault(current, by_id[current])
    return tuple(done.values())


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item belongs. `rank`: its cell's; `stage`: kinds of work in a cell; `order`: checks in a stage."""

    rank: int
    stage: int = 0
    order: int = 0


def arrange(items: list[T], place: Callable[[T], Place]) -> list[T]:
    """Items by cell, stage and order; stable, so equal ones stay as collected."""

    def key(item: T) -> tuple[int, int, int]:
        where = place(item)
        return where.rank, where.stage, where.order

    return sorted(items, key=key)


def cell_in(nodeid: str, ids: frozenset[str] | Mapping[str, object]) -> str | None:
    """The cell id inside a node id's brackets, beside other parameters (`test_x[sm120-m-baseline-8]`); the longest."""
    _, bracket, inside = nodeid.partition("[")
    if not bracket:
        return None
    inside = inside.rpartition("]")[0]
    if inside in ids:
        return inside
    parts = inside.split("-")
    spans = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    for i, j in sorted(spans, key=lambda span: span[0] - span[1]):
        candidate = "-".join(parts[i:j])
        if candidate in ids:
            return candidate
    return None


def without_cell(nodeid: str, cell_id: str) -> str:
    """The node id with its other parameters: `test_x[8]` for `test_x[sm120-m-baseline-8]`."""
    path, bracket, inside = nodeid.partition("[")
    rest = f"{bracket}{inside}".replace(cell_id, "", 1)
    return path + rest.replace("[]", "").replace("[-", "[").replace("-]", "]")


def group(nodeids: Sequence[str], ids: frozenset[str] | Mapping[str, object]) -> dict[str, list[int]]:
    """Cell id → positions of its tests, in order of appearance. A test of no cell is a group of its own."""
    groups: dict[str, list[int]] = {}
    for position, nodeid in enumerate(nodeids):
        groups.setdefault(cell_in(nodeid, ids) or nodeid, []).append(position)
    return groups


def estimate(cell: Cell, history: Mapping[str, float] | None = None) -> float:
    """Seconds the cell may take: what it took last time, else a rule of thumb by the number of GPUs."""
    return (history or {}).get(cell.id) or _START_SECONDS + _GPU_SECONDS * cell.gpus


def shares(cells: Sequence[Cell], count: int, history: Mapping[str, float] | None = None) -> list[list[Cell]]:
    """`cells` dealt out to `count` machines. Pure and deterministic: every machine finds the same shares.

    A model of one arch stays whole, with its baseline: ratios and outputs are compared on one machine. The models go,
    largest first, each to the machine that has least so far; what a cell costs is its seconds times its GPUs.
    """
    models: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        models.setdefault((cell.arch, cell.model.name), []).append(cell)

    def cost(unit: Sequence[Cell]) -> float:
        return sum(estimate(cell, history) * max(cell.gpus, 1) for cell in unit)

    found: list[list[Cell]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for unit in sorted(models.values(), key=lambda unit: (-cost(unit), unit[0].arch, unit[0].model.name)):
        least = loads.index(min(loads))
        found[least] += unit
        loads[least] += cost(unit)
    return found


def makespan(cells: Iterable[Cell], gpus: int, workers: int, history: Mapping[str, float] | None = None) -> float:
    """Seconds until all cells are done on `gpus` GPUs with `workers` servers at once, in the given order."""
    free_workers = [0.0] * max(workers, 1)
    free_gpus = [0.0] * max(gpus, 1)
    for cell in cells:
        free_workers.sort()
        free_gpus.sort()
        wanted = min(max(cell.gpus, 1), len(free_gpus))
        end = max(free_workers[0], free_gpus[wanted - 1]) + estimate(cell, history)
        free_workers[0] = end
        free_gpus[:wanted] = [end] * wanted
    return max(free_workers)
