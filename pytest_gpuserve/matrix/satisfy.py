"""Is there a cell that a predicate matches? Answered without making a matrix' full product."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING

from pytest_gpuserve.matrix.consistency import concrete_archs
from pytest_gpuserve.matrix.expand import cell_id, levels_for
from pytest_gpuserve.matrix.merge import contradictions, facts_for, levels_of, static_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpuserve.matrix.types import Level, Matrix
    from pytest_gpuserve.model.cell import ModelSpec
    from pytest_gpuserve.model.predicate import Predicate

__all__ = ["find_cell", "sets"]

# Only axes that the predicate looks at are varied; a predicate over so many that this is not enough is a strange one.
MAX_COMBINATIONS = 20_000


def find_cell(matrix: Matrix, predicate: Predicate) -> str | None:
    """The id of one cell that `predicate` matches, in any combination of levels; None if there is none."""
    for arch in concrete_archs(matrix):
        for model in matrix.models.values():
            static = static_facts(model, arch)
            rest = [term for term in predicate.terms if term.name not in static]
            if any(term.name.startswith("model.") for term in rest):
                continue
            if not all(term.holds(static) for term in predicate.terms if term.name in static):
                continue
            for axes in _candidates(matrix, model, arch, predicate):
                found = _cell(matrix, model, arch, axes, predicate)
                if found is not None:
                    return found
    return None


def sets(matrix: Matrix, fact: str) -> bool:
    """True if anything in the matrix sets the flag or variable that `fact` (`flag.NAME`, `env.NAME`) names."""
    owners: list[Matrix | ModelSpec | Level] = [matrix, *matrix.models.values()]
    owners += [level for named in matrix.axes.values() for level in named.values()]
    kind, _, name = fact.partition(".")
    return any((owner.flags if kind == "flag" else owner.env).get(name) is not None for owner in owners)


def _touches(level: Level, fact: str) -> bool:
    """True if the level sets the flag or variable, or takes it away."""
    kind, _, name = fact.partition(".")
    return name in (level.flags if kind == "flag" else level.env)


def _candidates(matrix: Matrix, model: ModelSpec, arch: str, predicate: Predicate) -> Iterator[dict[str, str]]:
    """Levels of the axes that can make a difference to the predicate; the others stay at the baseline."""
    possible = levels_for(matrix, model, arch)
    matters = _behind(possible, predicate.names)
    # A level may itself need a level, or a flag, of yet another axis.
    matters |= _behind(possible, [name for axis in matters for level in possible[axis] for name in level.when.names])
    choices = []
    for axis in sorted(matters):
        wanted = [term for term in predicate.terms if term.name == axis]
        choices.append([lvl for lvl in possible[axis] if all(term.holds({axis: lvl.name}) for term in wanted)])
    for combination in islice(product(*choices), MAX_COMBINATIONS):
        yield {level.axis: level.name for level in combination}


def _behind(possible: Mapping[str, list[Level]], names: Iterable[str]) -> set[str]:
    """The axes that are named, or have a level that sets a named flag or variable."""
    return {
        axis
        for axis, levels in possible.items()
        for name in names
        if name == axis or (name.startswith(("flag.", "env.")) and any(_touches(level, name) for level in levels))
    }


def _cell(matrix: Matrix, model: ModelSpec, arch: str, axes: dict[str, str], predicate: Predicate) -> str | None:
    facts = facts_for(matrix, model, arch, axes)
    if not predicate.matches(facts):
        return None
    base, deltas = levels_of(matrix, axes)
    if not all(level.when.matches(facts) for level in (*base, *deltas)) or contradictions(deltas):
        return None
    if any(exclude.when.matches(facts) for exclude in matrix.exclude):
        return None
    return cell_id(arch, model.name, deltas)
