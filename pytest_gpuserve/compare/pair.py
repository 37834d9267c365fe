"""Pairs the cells of two records by identity: arch + model + a level for every axis."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["pairs"]

Cell = dict[str, Any]
Group = tuple[str, str]
Key = tuple[str, str, tuple[tuple[str, str], ...]]


def pairs(a: list[Cell], b: list[Cell]) -> Iterator[tuple[Cell | None, Cell | None]]:
    """Every cell of both records once: pairs and new cells in `b`'s order, then what is only in `a`.

    Never by order or by the text of an id. An axis that one record does not know stands at the other's baseline, so
    that an axis added to the matrix pairs every old cell with the new one that launches the same thing.
    """
    missing_in_a, missing_in_b = _defaults(a, b), _defaults(b, a)
    waiting: dict[Key, list[Cell]] = defaultdict(list)
    for cell in a:
        waiting[_key(cell, missing_in_a)].append(cell)
    for cell in b:
        same = waiting.get(_key(cell, missing_in_b))
        yield (same.pop(0) if same else None), cell
    for cells in waiting.values():
        for cell in cells:
            yield cell, None


def _key(cell: Cell, defaults: dict[Group, dict[str, str]]) -> Key:
    axes = cell["axes"]
    extra = defaults.get((cell["arch"], cell["model"]))
    if extra:
        axes = {**extra, **axes}
    return cell["arch"], cell["model"], tuple(sorted(axes.items()))


def _defaults(cells: Iterable[Cell], others: Iterable[Cell]) -> dict[Group, dict[str, str]]:
    """For each arch and model: the axes that only `others` know, at their baseline there."""
    known = _axes(cells)
    found = {}
    for group, baseline in _axes(others).items():
        if group in known:
            found[group] = {axis: level for axis, level in baseline.items() if axis not in known[group]}
    return found


def _axes(cells: Iterable[Cell]) -> dict[Group, dict[str, str]]:
    """Each group's axes with their baseline level."""
    axes: dict[Group, dict[str, str]] = defaultdict(dict)
    for cell in cells:
        axes[cell["arch"], cell["model"]].update(cell.get("baseline") or {})
    return axes
