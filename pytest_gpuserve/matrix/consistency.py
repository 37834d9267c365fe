"""What a matrix says that cannot be: found when the file is loaded, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.merge import contradictions, facts_for, levels_of
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import describe
from pytest_gpuserve.model.arch import family_of, is_arch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.types import Include, Level, Matrix
    from pytest_gpuserve.matrix.walk import Reader
    from pytest_gpuserve.model.cell import ModelSpec

__all__ = ["check", "concrete_archs"]

_KNOWN_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")


def concrete_archs(matrix: Matrix) -> tuple[str, ...]:
    """The archs a matrix is for; a family counts as the members known today."""
    archs: list[str] = []
    for arch in matrix.archs:
        archs += [arch] if is_arch(arch) else [known for known in _KNOWN_ARCHS if family_of(known) == arch]
    return tuple(dict.fromkeys(archs))


def check(reader: Reader, matrix: Matrix) -> None:
    """Reports contradictions between parts that are each well formed."""
    if set(matrix.baseline) != set(matrix.axes):
        return  # reported already; nothing below can be said without a baseline
    base, _ = levels_of(matrix, {})
    for contradiction in contradictions(base):
        reader.add(base[0].where, f"the baseline contradicts itself: {contradiction}")
    for model in matrix.models.values():
        _check_baseline(reader, matrix, model)
    for include in matrix.include:
        _check_include(reader, matrix, include)
    _check_reach(reader, matrix, "defaults", matrix.flags, matrix.env, None)
    for model in matrix.models.values():
        _check_reach(reader, matrix, f"models.{model.name}", model.flags, model.env, model.where)
    _check_nulls(reader, matrix)
    _check_cells(reader, matrix)


def _unfit(matrix: Matrix, model: ModelSpec, axes: Mapping[str, str], levels: Iterable[Level]) -> list[Level]:
    """The levels that fit this model's cell on none of the matrix' archs."""
    facts = [facts_for(matrix, model, arch, axes) for arch in concrete_archs(matrix)]
    return [level for level in levels if facts and not any(level.when.matches(each) for each in facts)]


def _check_baseline(reader: Reader, matrix: Matrix, model: ModelSpec) -> None:
    for level in _unfit(matrix, model, {}, levels_of(matrix, {})[0]):
        reader.add(
            level.where,
            f"the baseline's level {level} does not fit model {model.name}: it needs {describe(level.when)}. "
            "Every model starts from the baseline: choose a level there that fits all, or drop the `when`",
        )


def _check_include(reader: Reader, matrix: Matrix, include: Include) -> None:
    _, deltas = levels_of(matrix, include.axes)
    for contradiction in contradictions(deltas):
        reader.add(include.where, f"this cell contradicts itself: {contradiction}")
    unfit = {name: _unfit(matrix, matrix.models[name], include.axes, deltas) for name in include.models}
    if include.named or all(unfit.values()):
        for name, levels in unfit.items():
            for level in levels:
                reader.add(
                    include.where,
                    f"this cell cannot be: level {level} needs {describe(level.when)}, model {name} does not have it",
                )


def _check_reach(
    reader: Reader,
    matrix: Matrix,
    owner: str,
    flags: Mapping[str, object],
    env: Mapping[str, object],
    where: Where | None,
) -> None:
    """A setting that every level of some axis overrides is never used: most likely a misunderstanding."""
    for axis, levels in matrix.axes.items():
        if not levels:
            continue
        for kind, given in (("flags", flags), ("env", env)):
            for name in given:
                if all(name in (level.flags if kind == "flags" else level.env) for level in levels.values()):
                    first = next(iter(levels.values()))
                    reader.add(
                        where or first.where,
                        f"{owner}.{kind}.{name} is never used: every level of axis {axis} sets it itself",
                    )


def _check_nulls(reader: Reader, matrix: Matrix) -> None:
    """A null that takes away what nothing sets is most likely a misspelt name."""
    levels = [level for named in matrix.axes.values() for level in named.values()]
    for model in matrix.models.values():
        _check_null(reader, f"models.{model.name}", model, [matrix])
    for level in levels:
        others = [other for other in levels if other.axis != level.axis]
        _check_null(reader, f"level {level}", level, [matrix, *matrix.models.values(), *others])


def _check_null(
    reader: Reader, who: str, owner: ModelSpec | Level, before: Sequence[Matrix | ModelSpec | Level]
) -> None:
    for kind in ("flag", "env"):
        given = _given(owner, kind)
        for name in [name for name, value in given.items() if value is None]:
            known = [key for one in before for key, value in _given(one, kind).items() if value is not None]
            if name not in known:
                what = "flag" if kind == "flag" else "variable"
                reader.add(
                    owner.places[f"{kind}.{name}"],
                    f"{who}: null takes the {what} '{name}' away, and nothing before it sets that"
                    f"{did_you_mean(name, known)}",
                )


def _given(owner: Matrix | ModelSpec | Level, kind: str) -> Mapping[str, object]:
    return owner.flags if kind == "flag" else owner.env


def _check_cells(reader: Reader, matrix: Matrix) -> None:
    """What only a whole cell shows: here already, so that it is reported beside every other problem of the files."""
    for arch in concrete_archs(matrix):
        try:
            expand(matrix, arch, strategy="one-at-a-time", versions={})
        except FileProblems as error:
            reader.problems += error.problems
