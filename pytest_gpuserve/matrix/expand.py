"""From a matrix to its cells."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from pytest_gpuserve.engine.flags import PARALLEL_SIZES, size_problem
from pytest_gpuserve.errors import FileProblems, Problem, UsageError, Where
from pytest_gpuserve.matrix.merge import contradictions, launch_of, levels_of, static_facts
from pytest_gpuserve.matrix.types import STRATEGIES
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import describe, version_of
from pytest_gpuserve.model.arch import CPU
from pytest_gpuserve.model.cell import Cell, facts_of
from pytest_gpuserve.model.versions import admits, is_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpuserve.matrix.types import Level, Matrix
    from pytest_gpuserve.model.cell import FlagValue, ModelSpec

__all__ = ["MAX_CELLS", "Expansion", "LeftOut", "cell_id", "expand", "expand_all", "levels_for"]

MAX_CELLS = 100_000


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A combination that makes no cell, and why: excluded, or the same launch as the baseline. Shown by the plan."""

    id: str
    reason: str
    where: Where | None


@dataclass(frozen=True, slots=True)
class Expansion:
    """The cells of one matrix on one arch, in order, and what was left out."""

    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]


def expand(matrix: Matrix, arch: str, *, strategy: str | None = None, versions: Mapping[str, str]) -> tuple[Cell, ...]:
    """The cells of `matrix` on `arch`; see `expand_all`."""
    return expand_all(matrix, arch, strategy=strategy, versions=versions).cells


def expand_all(matrix: Matrix, arch: str, *, strategy: str | None = None, versions: Mapping[str, str]) -> Expansion:
    """The cells of `matrix` on `arch`, model by model: the strategy's, then `include`'s, each once.

    A level whose `when` does not hold makes no cell. One whose `requires`, or its model's, is not met by `versions` (of
    distributions in the environment under test, and of the machine's driver) makes a cell that is not applicable, with
    the reason: too old, too new, not known, or not a version that can be compared.
    UsageError if the matrix is not for this arch, the strategy is unknown, or there would be more than MAX_CELLS.
    FileProblems for cells whose parallel sizes do not take their model's GPUs, and for ids that are not unique.
    """
    strategy = strategy or matrix.strategy
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy '{strategy}'{did_you_mean(strategy, STRATEGIES)}")
    if not matrix.covers(arch):
        raise UsageError(f"{matrix.path} is for {', '.join(matrix.archs)}, not for {arch}")
    expander = _Expander(matrix, arch, versions)
    for model in matrix.models.values():
        expander.add_model(model, strategy)
    expander.check_ids()
    if expander.problems:
        raise FileProblems(sorted(set(expander.problems)))
    return Expansion(tuple(expander.cells), tuple(expander.left_out))


def levels_for(matrix: Matrix, model: ModelSpec, arch: str) -> dict[str, list[Level]]:
    """The levels of each axis that this model can have as far as no other axis is concerned, the baseline's first."""
    facts = static_facts(model, arch)
    possible: dict[str, list[Level]] = {}
    for axis, levels in matrix.axes.items():
        base = levels[matrix.baseline[axis]]
        rest = [level for level in levels.values() if level is not base]
        possible[axis] = [base, *(level for level in rest if _depends(level) or level.when.matches(facts))]
    return possible


def cell_id(arch: str, model: str, deltas: Iterable[Level]) -> str:
    """`sm120-kimi-mini-baseline`, `sm120-kimi-mini-attention.flashinfer+nccl.tuned`."""
    return f"{arch}-{model}-{'+'.join(str(level) for level in deltas) or 'baseline'}"


def _given(flags: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """As the command line has them: False leaves a flag out."""
    return {name: value for name, value in flags.items() if value is not False}


def _depends(level: Level) -> bool:
    """True if the level's `when` looks at other axes, flags or variables, so that only a whole cell decides."""
    return any(not name.startswith("model.") and name not in ("arch", "gpus", "model") for name in level.when.names)


@dataclass(slots=True)
class _Expander:
    matrix: Matrix
    arch: str
    versions: Mapping[str, str]
    cells: list[Cell] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    unmet: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        owners: list[tuple[str, Level | ModelSpec]] = [
            (f"level {level}", level) for levels in self.matrix.axes.values() for level in levels.values()
        ]
        owners += [(f"model {model.name}", model) for model in self.matrix.models.values()]
        for what, owner in owners:
            reasons = [self._unmet(what, name, wanted) for name, wanted in owner.requires.items()]
            if any(reasons):
                self.unmet[id(owner)] = "; ".join(reason for reason in reasons if reason)

    def _unmet(self, what: str, name: str, wanted: str) -> str:
        installed = version_of(name, self.versions)
        if installed is None:
            return f"{what} needs {name}{wanted}: the version of {name} is not known"
        if not is_version(installed):
            return f"{what} needs {name}{wanted}: its version here, {installed!r}, cannot be compared"
        return "" if admits(wanted, installed) else f"{what} needs {name}{wanted}, installed is {installed}"

    def add_model(self, model: ModelSpec, strategy: str) -> None:
        possible = levels_for(self.matrix, model, self.arch)
        base, _ = levels_of(self.matrix, {})
        flags, env = launch_of(self.matrix, model, base, ())
        baseline = (_given(flags), env)
        facts = static_facts(model, self.arch)
        unfit = [level for level in base if not _depends(level) and not level.when.matches(facts)]
        if unfit:  # that it fits on another of the matrix' archs was checked on loading
            reason = f"the baseline's level {unfit[0]} needs {describe(unfit[0].when)}"
            self.left_out.append(LeftOut(cell_id(self.arch, model.name, ()), reason, unfit[0].where))
            return
        seen: set[tuple[str, ...]] = set()
        for levels, where in self._combinations(possible, strategy, model):
            names = tuple(level.name for level in levels)
            if names not in seen:
                seen.add(names)
                self._add(model, levels, baseline, where)

    def _combinations(
        self, possible: dict[str, list[Level]], strategy: str, model: ModelSpec
    ) -> Iterator[tuple[tuple[Level, ...], Where | None]]:
        """A level for every axis, in axis order."""
        base = tuple(levels[0] for levels in possible.values())
        yield base, None
        if strategy == "one-at-a-time":
            for index, levels in enumerate(possible.values()):
                for level in levels[1:]:
                    yield (*base[:index], level, *base[index + 1 :]), level.where
        elif strategy == "full":
            count = math.prod(len(levels) for levels in possible.values())
            if count > MAX_CELLS:
                raise UsageError(
                    f"{self.matrix.path}: the strategy 'full' would make {count:,} cells of model {model.name} alone, "
                    f"more than {MAX_CELLS:,}. Choose one-at-a-time, or take levels or axes out."
                )
            for combination in product(*possible.values()):
                yield combination, None
        for include in self.matrix.include:
            if model.name in include.models:
                chosen = tuple(
                    self.matrix.axes[axis][include.axes.get(axis, self.matrix.baseline[axis])] for axis in possible
                )
                if all(level in possible[level.axis] for level in chosen):
                    yield chosen, include.where

    def _add(
        self,
        model: ModelSpec,
        levels: tuple[Level, ...],
        baseline: tuple[Mapping[str, object], Mapping[str, str]],
        where: Where | None,
    ) -> None:
        known_good = self.matrix.baseline
        deltas = [level for level in levels if level.name != known_good[level.axis]]
        base = [level for level in levels if level.name == known_good[level.axis]]
        flags, env = launch_of(self.matrix, model, base, deltas)
        reasons = [self.unmet[id(one)] for one in (model, *levels) if id(one) in self.unmet] if self.unmet else []
        if len(deltas) > 1:
            reasons += contradictions(deltas)
        misfit = size_problem(flags, model.gpus) if self.arch != CPU else ""
        # A full product crosses sizes that nobody meant to go together, as it crosses levels that contradict each
        # other; a cell that the file itself asks for is the file's mistake.
        crossed = len(deltas) > 1 and where is None
        if misfit and crossed:
            reasons.append(misfit)
        cell = Cell(
            id=cell_id(self.arch, model.name, deltas),
            arch=self.arch,
            model=model,
            axes={level.axis: level.name for level in levels},
            deltas=tuple(level.axis for level in deltas),
            flags=flags,
            env=env,
            not_applicable="; ".join(reasons) or None,
            notes=tuple(f"{level}: {level.note}" for level in levels if level.note),
            matrix=self.matrix.name,
            limits=self.matrix.limits,
            where=where or model.where,
        )
        dependent = [level for level in deltas if _depends(level)]
        facts = facts_of(cell) if dependent or self.matrix.exclude else {}
        if not all(level.when.matches(facts) for level in dependent):
            return
        exclude = next((exclude for exclude in self.matrix.exclude if exclude.when.matches(facts)), None)
        if exclude is not None:
            self.left_out.append(LeftOut(cell.id, exclude.reason, exclude.where))
        elif (_given(flags), env) == baseline and any(level.flags or level.env for level in deltas):
            self.left_out.append(LeftOut(cell.id, "the same launch as this model's baseline", cell.where))
        else:
            if misfit and not crossed:
                self._refuse(model, base, deltas, misfit)
            self.cells.append(cell)

    def _refuse(self, model: ModelSpec, base: list[Level], deltas: list[Level], misfit: str) -> None:
        """A problem where the size that decided is written, the last of those that set one."""
        owners: list[Matrix | ModelSpec | Level] = [self.matrix, model, *base, *deltas]
        facts = [f"flag.{name}" for name in (*PARALLEL_SIZES, "enable-dp-attention")]
        places = [owner.places[fact] for owner in owners for fact in facts if fact in owner.places]
        where = places[-1] if places else model.where or Where(str(self.matrix.path))
        self.problems.append(Problem(where, f"model {model.name}: {misfit}"))

    def check_ids(self) -> None:
        """Ids must tell cells apart; names with - and . can make two read the same."""
        first: dict[str, Cell] = {}
        for cell in self.cells:
            other = first.setdefault(cell.id, cell)
            if other is not cell:
                where = cell.model.where or cell.where or Where(str(self.matrix.path))
                what = (
                    f"models {other.model.name} and {cell.model.name} both make a cell '{cell.id}': rename one of them"
                )
                raise FileProblems([Problem(where, what)])
