"""What a cell launches with: how defaults, the model and the levels of the axes come together.

Later ones win: the matrix' defaults, the model's settings, the baseline's levels, the deltas' levels. So a delta always
shows: were the order that of the axes in the file, a baseline level of a later axis would silently undo the delta of an
earlier one. Two levels of the same rank that set one flag (or variable) to different values contradict each other, and
no order between them would be right: two baseline levels are refused when the file is loaded, two deltas when
`include` names them; a full product skips such cells with the reason.

A flag or variable that a model or a level sets to null is taken away from what came before it.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.matrix.types import Level, Matrix
    from pytest_gpuserve.model.cell import FlagSetting, FlagValue, ModelSpec

__all__ = ["contradictions", "facts_for", "launch_of", "levels_of", "static_facts"]


def levels_of(matrix: Matrix, axes: Mapping[str, str]) -> tuple[list[Level], list[Level]]:
    """The levels that `axes` name (others at the baseline): the baseline's, then the deltas', each in axis order."""
    base: list[Level] = []
    deltas: list[Level] = []
    for axis, levels in matrix.axes.items():
        name = axes.get(axis, matrix.baseline[axis])
        (base if name == matrix.baseline[axis] else deltas).append(levels[name])
    return base, deltas


def launch_of(
    matrix: Matrix, model: ModelSpec, base: Iterable[Level], deltas: Iterable[Level]
) -> tuple[dict[str, FlagValue], dict[str, str]]:
    """The merged flags and environment."""
    flags: dict[str, FlagSetting] = {**matrix.flags, **model.flags}
    env: dict[str, str | None] = {**matrix.env, **model.env}
    for levels in (base, deltas):
        for level in levels:
            flags.update(level.flags)
            env.update(level.env)
    return (
        {name: value for name, value in flags.items() if value is not None},
        {name: value for name, value in env.items() if value is not None},
    )


def contradictions(levels: Sequence[Level]) -> list[str]:
    """`attention.fa3 and mode.safe set flag 'attention-backend' to 'fa3' and 'triton'`, for levels of one rank."""
    found = []
    for one, other in combinations(levels, 2):
        pairs: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
            ("flag", one.flags, other.flags),
            ("variable", one.env, other.env),
        )
        found += [
            f"{one} and {other} set {kind} '{name}' to {_shown(first[name])} and {_shown(second[name])}"
            for kind, first, second in pairs
            for name in first
            if name in second and first[name] != second[name]
        ]
    return found


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)


def static_facts(model: ModelSpec, arch: str) -> dict[str, object]:
    """The facts that no axis changes."""
    properties = {f"model.{name}": value for name, value in model.properties.items()}
    return {"arch": arch, "gpus": model.gpus, "model": model.name, **properties}


def facts_for(matrix: Matrix, model: ModelSpec, arch: str, axes: Mapping[str, str]) -> dict[str, object]:
    """As `cell.facts_of`, for the cell with these levels (others at the baseline)."""
    flags, env = launch_of(matrix, model, *levels_of(matrix, axes))
    return {
        **matrix.baseline,
        **axes,
        **static_facts(model, arch),
        **{f"flag.{name}": value for name, value in flags.items()},
        **{f"env.{name}": value for name, value in env.items()},
    }
