"""Floors that no run can judge: of what a load does not measure, of no cell or none to compare with, or in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.matrix.consistency import concrete_archs
from pytest_gpuserve.matrix.expand import cell_id, expand
from pytest_gpuserve.matrix.merge import levels_of
from pytest_gpuserve.matrix.satisfy import find_cell
from pytest_gpuserve.matrix.when import describe
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.predicate import Predicate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Floor, Matrix
    from pytest_gpuserve.matrix.walk import Reader
    from pytest_gpuserve.model.cell import Cell

__all__ = ["check_floors"]

_BETWEEN_TOKENS = ("_tpot_ms", "_itl_ms")
_TWO_TOKENS = 2
# By cell id: the cells whose results it waits for, each with the floor that says so; None: its own baseline.
Waits = dict[str, dict[str, "Floor | None"]]


def check_floors(reader: Reader, matrix: Matrix) -> None:
    """Reports floors of `matrix` that no run by its strategy judges.

    A warning where another strategy, or an entry of `include`, would make the cell that is missing.
    """
    if not matrix.floors:
        return
    for floor in matrix.floors:
        _measured(reader, matrix, floor)
    try:
        cells = [cell for arch in concrete_archs(matrix) for cell in expand(matrix, arch, versions={})]
    except UsageError:  # what is wrong there is reported for the matrix itself, or it has too many cells to look at
        return
    facts = {cell.id: facts_of(cell) for cell in cells}
    by_identity = {cell.identity: cell for cell in cells}
    waits: Waits = {cell.id: {} for cell in cells}
    for floor in matrix.floors:
        asked = [cell for cell in cells if floor.when.matches(facts[cell.id])]
        if not asked:
            _no_cell(reader, matrix, floor)
        elif floor.ratio is not None:
            _compared(reader, matrix, floor, asked, by_identity, waits)
    for cell in cells:
        base = by_identity.get((cell.arch, cell.model.name, tuple(sorted(matrix.baseline.items()))))
        if base is not None and base is not cell:
            waits[cell.id].setdefault(base.id, None)
    _circles(reader, waits)


def _measured(reader: Reader, matrix: Matrix, floor: Floor) -> None:
    """Reports a floor on the time between tokens where every answer has one only."""
    load, name = matrix.loads.get(floor.load), floor.metric.name
    if load is not None and load.output < _TWO_TOKENS and name.endswith(_BETWEEN_TOKENS):
        what = f"this floor is never judged: {name} is the time after the first token, and an answer of load"
        reader.add(floor.where, f"{what} '{load.name}' has no second one: give the load an output of at least 2")


def _no_cell(reader: Reader, matrix: Matrix, floor: Floor) -> None:
    found = find_cell(matrix, floor.when)
    wanted = describe(floor.when)
    if found is None:
        reader.add(floor.where, f"this floor is never judged: no cell of this matrix can have {wanted}")
    else:
        what = f"this floor is never judged: {_unmade(matrix)} a cell with {wanted}, such as {found}"
        reader.add(floor.where, what, warning=True)


def _unmade(matrix: Matrix) -> str:
    return f"neither the strategy '{matrix.strategy}' nor `include` makes"


def _compared(
    reader: Reader,
    matrix: Matrix,
    floor: Floor,
    asked: Sequence[Cell],
    by_identity: Mapping[tuple[str, str, tuple[tuple[str, str], ...]], Cell],
    waits: Waits,
) -> None:
    """Notes in `waits` which cells the `asked` are compared with, and reports a ratio that has none at all."""
    missing: list[tuple[Cell, dict[str, str]]] = []
    found = False
    for cell in asked:
        axes = floor.reference(cell.axes, matrix.baseline)
        if axes is None or axes == dict(cell.axes):
            continue  # the ratio to the cell itself asks for nothing
        reference = by_identity.get((cell.arch, cell.model.name, tuple(sorted(axes.items()))))
        if reference is None:
            missing.append((cell, axes))
        else:
            found = True
            waits[cell.id].setdefault(reference.id, floor)
    if found:
        return
    if not missing:
        reader.add(floor.where, f"this floor is never judged: it compares {asked[0].id} with itself")
        return
    possible = next((one for one in missing if _possible(matrix, *one)), None)
    cell, axes = possible or missing[0]
    other = cell_id(cell.arch, cell.model.name, levels_of(matrix, axes)[1])
    why = f"{_unmade(matrix)} that cell" if possible else "no such cell can be"
    what = f"this floor is never judged: it compares {cell.id} with {other}, and {why}"
    reader.add(floor.where, what, warning=possible is not None)


def _possible(matrix: Matrix, cell: Cell, axes: Mapping[str, str]) -> bool:
    """True if another strategy makes the cell that is like `cell` but for its `axes`."""
    return find_cell(matrix, Predicate.of({**axes, "arch": cell.arch, "model": cell.model.name})) is not None


def _circles(reader: Reader, waits: Waits) -> None:
    """A cell cannot run after one that waits for it. Each circle of floors once, whatever models it holds for."""
    told = set()
    for circle in _circles_of(waits):
        steps = [(one, other, waits[one][other]) for one, other in zip(circle, circle[1:] + circle[:1], strict=True)]
        floors = sorted((floor.where for _, _, floor in steps if floor is not None))
        if tuple(floors) in told:
            continue
        told.add(tuple(floors))
        path = ", ".join(
            f"{one} for {other} ({f'line {floor.where.line}' if floor is not None else 'its baseline'})"
            for one, other, floor in steps
        )
        reader.add(floors[0], f"not all floors can be judged, since cells wait for each other: {path}")


def _circles_of(waits: Waits) -> Iterator[list[str]]:
    left = dict(waits)
    while True:
        while free := [one for one, others in left.items() if not others.keys() & left.keys()]:
            for one in free:
                del left[one]
        if not left:
            return
        path = [next(iter(left))]
        while (following := next(other for other in left[path[-1]] if other in left)) not in path:
            path.append(following)
        circle = path[path.index(following) :]
        yield circle
        for one in circle:
            del left[one]
