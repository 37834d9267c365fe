"""Pairs the cells of two records by identity: arch + model + a level for every axis."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["pairs"]

Cell = dict[str, Any]
Group = tuple[str, str]
Axes = dict[Group, dict[str, str]]
Key = tuple[str, str, tuple[tuple[str, str], ...]]


def pairs(a: list[Cell], b: list[Cell]) -> Iterator[tuple[Cell | None, Cell | None]]:
    """Every cell of both records once: pairs and new cells in `b`'s order, then what is only in `a`.

    Never by order or by the text of an id. An axis that one record does not know stands at the other's baseline, so
    that an axis added to the matrix pairs every old cell with the new one that launches the same thing.
    """
    axes_a, axes_b = _axes(a), _axes(b)
    missing_in_a, missing_in_b = _missing(axes_a, axes_b), _missing(axes_b, axes_a)
    waiting: dict[Key, list[Cell]] = defaultdict(list)
    for cell in a:
        waiting[_key(cell, missing_in_a)].append(cell)
    for cell in b:
        same = waiting.get(_key(cell, missing_in_b))
        yield (same.pop(0) if same else None), cell
    for cells in waiting.values():
        for cell in cells:
            yield cell, None


def _key(cell: Cell, defaults: Axes) -> Key:
    axes = cell["axes"]
    extra = defaults.get((cell["arch"], cell["model"]))
    if extra:
        axes = {**extra, **axes}
    return cell["arch"], cell["model"], tuple(sorted(axes.items()))


def _missing(known: Axes, others: Axes) -> Axes:
    """For each arch and model in both: the axes that only `others` know, at their baseline there."""
    return {
        group: {axis: level for axis, level in baseline.items() if axis not in known[group]}
        for group, baseline in others.items()
        if group in known
    }


def _axes(cells: Iterable[Cell]) -> Axes:
    """Each group's axes with their baseline level."""
    axes: Axes = defaultdict(dict)
    for cell in cells:
        axes[cell["arch"], cell["model"]].update(cell.get("baseline") or {})
    return axes
