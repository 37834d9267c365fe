"""Which floors hold for a cell, what each asks for in numbers, and how a measurement stands against it. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.matrix.types import METRICS
from pytest_gpuserve.measure.stats import Decision, Reference, judge, mad, median_error, start_error
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.record import Measurement
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.matrix.types import Floor, Matrix
    from pytest_gpuserve.measure.profile import LoadProfile
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.record import CellRecord

__all__ = [
    "Beside",
    "Bound",
    "Needs",
    "Past",
    "Verdict",
    "asked_by",
    "bound_of",
    "measurements",
    "needs_of",
    "verdict_of",
]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a cell must measure: `floors` of its own, `loads` of those and of cells that are compared with it.

    `references` are the ids of the cells it is compared with.
    """

    floors: tuple[Floor, ...] = ()
    loads: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


def needs_of(
    cells: Sequence[Cell],
    matrices: Mapping[str, Matrix],
    marked: Mapping[str, Sequence[Floor]] | None = None,
    known: Mapping[str, tuple[Floor, ...]] | None = None,
) -> dict[str, Needs]:
    """By cell id; cells that need nothing are left out.

    `marked` are ratios that tests' own marks set, by cell id. The test measures its cell itself, so they ask only for
    the cell that is compared with, and for a load of it where the mark names one. `known` is what `asked_by` says of
    each cell, those without floors left out, for a caller who has it already.
    """
    marked = marked or {}
    if known is None:
        known = {cell.id: asked_by(matrices[cell.matrix], cell) for cell in cells if cell.matrix in matrices}
    with_floors = [
        (cell, floors, marks)
        for cell in cells
        if cell.matrix in matrices and ((floors := known.get(cell.id, ())) + (marks := tuple(marked.get(cell.id, ()))))
    ]
    if not with_floors:
        return {}
    by_axes = {(cell.matrix, *cell.identity): cell for cell in cells}
    found: dict[str, Needs] = defaultdict(Needs)
    for cell, floors, marks in with_floors:
        mine = found[cell.id]
        loads = dict.fromkeys((*mine.loads, *(floor.load for floor in floors)))
        references: dict[str, None] = {}
        for floor in (*floors, *marks):
            reference = _reference(floor, cell, matrices[cell.matrix], by_axes)
            if reference is None or reference is cell:
                continue
            references[reference.id] = None
            theirs = found[reference.id]
            asked = (floor.load,) if floor.load else ()
            found[reference.id] = replace(theirs, loads=tuple(dict.fromkeys((*theirs.loads, *asked))))
        found[cell.id] = Needs(floors, tuple(loads), tuple(references))
    return dict(found)


def asked_by(matrix: Matrix, cell: Cell) -> tuple[Floor, ...]:
    """The floors that hold for the cell; a ratio to the cell itself (the baseline's, to the baseline) is none."""
    if not matrix.floors:
        return ()
    facts = facts_of(cell)
    return tuple(
        floor
        for floor in matrix.floors
        if floor.when.matches(facts) and floor.reference(cell.axes, matrix.baseline) != dict(cell.axes)
    )


def _reference(floor: Floor, cell: Cell, matrix: Matrix, by_axes: Mapping[tuple[Any, ...], Cell]) -> Cell | None:
    axes = floor.reference(cell.axes, matrix.baseline)
    if axes is None:
        return None
    return by_axes.get((cell.matrix, cell.arch, cell.model.name, tuple(sorted(axes.items()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A floor in numbers: `limit` in the metric's unit, and the `reference` that it was measured from, if it was.

    `text` says it in words, `where` is the `file:line` that set it. `compared` is the id of the cell that a ratio
    compares with. With `missing`, the reason, there is no limit.
    """

    metric: str
    load: str
    text: str
    where: str
    limit: float = 0.0
    reference: Reference | None = None
    compared: str = ""
    note: str = ""
    missing: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the record keeps it."""
        return {"text": self.text, "where": self.where, "limit": round(self.limit, 4), "note": self.note}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Medians of earlier runs of the same cell on the same kind of GPUs by the same method, newest first."""

    medians: tuple[float, ...] = ()
    runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The cell that a ratio compares with. `record` is what its own turn in this session gave, None if it had none.

    `starts` are the metric's window samples of its further starts on the judged cell's GPUs, `problem` why there are no
    more of them. `gpus` are the UUIDs of those GPUs.
    """

    name: str
    record: CellRecord | None = None
    starts: Sequence[Sequence[float]] = ()
    problem: str = ""
    gpus: Sequence[str] = ()


def bound_of(floor: Floor, beside: Beside, past: Past, *, method: str) -> Bound:
    """`floor` in numbers: a ratio by what is `beside` the cell, a share of its history by its `past`."""
    metric = floor.metric
    unit = metric.unit
    bare = Bound(metric=metric.name, load=floor.load, text="", where=f"{floor.where.file}:{floor.where.line}")
    if floor.limit is not None:
        return replace(bare, text=f"{metric.bound} {floor.limit:g} {unit}", limit=floor.limit)
    if floor.ratio is not None:
        return _relative(bare, floor.ratio, beside, method=method)
    assert floor.history_ratio is not None
    text = f"{metric.bound} {floor.history_ratio:g} of the median of the last {number(floor.history_last, 'run')}"
    medians = past.medians[: floor.history_last]
    if not medians:
        seen = f"{number(past.runs, 'record is', 'records are')} there, none of this cell on these GPUs by this method"
        return replace(bare, text=text, missing=f"no history: {seen}")
    middle = median(medians)
    error = floor.history_ratio * median_error(medians)
    return replace(
        bare,
        text=f"{text} ({middle:.4g} {unit})",
        limit=floor.history_ratio * middle,
        reference=Reference(error=error, count=len(medians), one="earlier run", many="earlier runs"),
        note="" if len(medians) == floor.history_last else f"of {number(len(medians), 'run')} only",
    )


def _relative(bare: Bound, ratio: float, beside: Beside, *, method: str) -> Bound:
    metric, name, record = METRICS[bare.metric], beside.name, beside.record
    text = f"{metric.bound} {ratio:g} × {name}"
    if record is None:
        return replace(bare, text=text, missing=f"{name} has no result in this session")
    mine = [one for one in record.measurements if one["load"] == bare.load and one["metric"] == bare.metric]
    # The built-in check's rows have no test, and come first: its server ran nothing else before.
    measured = min(mine, key=lambda one: bool(one.get("test")), default=None)
    if measured is None or measured.get("median") is None:
        return replace(bare, text=text, missing=f"{name} ({record.outcome}) has no measurement of {bare.load}")
    if measured.get("verdict") == "invalid":
        return replace(bare, text=text, missing=f"the measurement of {name} is invalid: {measured.get('note')}")
    if measured.get("method") != method:
        return replace(bare, text=text, missing=f"{name} was measured by another method")
    theirs = [str(gpu["uuid"]) for gpu in record.gpus]
    earlier = by_start([float(sample) for sample in measured["samples"]], measured.get("starts"))
    # One GPU can be a few percent slower than its neighbour: what ran elsewhere is a hint, and no reference.
    here = set(theirs) == set(beside.gpus)
    starts = [*(earlier if here else ()), *beside.starts]
    again = ", and was started on these too" if beside.starts else ""
    notes = [] if here else [f"{name} ran on other GPUs ({', '.join(theirs)}){again}"]
    notes += [beside.problem] if beside.problem else []
    used = starts or earlier
    middle = median([median(start) for start in used])
    place = "" if here else " on these GPUs"
    return replace(
        bare,
        text=f"{text} ({middle:.4g} {metric.unit})",
        limit=ratio * middle,
        reference=Reference(
            error=ratio * start_error(used),
            count=len(starts),
            one=f"start of {name}{place}",
            many=f"starts of {name}{place}",
        ),
        compared=name,
        note="; ".join(notes),
    )


def by_start(samples: Sequence[float], counts: Sequence[int] | None) -> list[list[float]]:
    """The samples of each server start; all of one start where a record does not say how many each had."""
    found, rest = [], list(samples)
    for count in counts or (len(rest),):
        found.append(rest[:count])
        rest = rest[count:]
    return [start for start in found if start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a load stands against one floor. `verdict` is `ok`, `below-floor`, `inconclusive` or `invalid`."""

    bound: Bound
    verdict: str
    decision: Decision | None
    text: str


def verdict_of(bound: Bound, starts: Sequence[Sequence[float]], invalid: str | None) -> Verdict:
    """`starts` holds the metric's window samples, one list a server start; `invalid` why none of them counts."""
    metric = METRICS[bound.metric]
    head = f"{bound.load}: {bound.metric}"
    floor = f"floor: {bound.text} ({bound.where})" + (f"; {bound.note}" if bound.note else "")
    if bound.missing:
        return Verdict(
            bound=bound,
            verdict="inconclusive",
            decision=None,
            text=f"{head} cannot be judged: {bound.missing}; {floor}",
        )
    if not starts or not all(starts):
        return Verdict(bound=bound, verdict="inconclusive", decision=None, text=f"{head} has no samples; {floor}")
    decision = judge(starts, bound.limit, higher=metric.higher, reference=bound.reference)
    seen = f"{head} is {decision.median:.4g} {metric.unit}"
    if invalid is not None:
        return Verdict(
            bound=bound, verdict="invalid", decision=decision, text=f"{seen}, but invalid: {invalid}; {floor}"
        )
    return Verdict(bound=bound, verdict=decision.verdict, decision=decision, text=f"{seen}: {decision.text}; {floor}")


_WORST = ("below-floor", "invalid", "inconclusive", "ok")


def measurements(
    profile: LoadProfile,
    starts: Sequence[Sequence[Mapping[str, float]]],
    verdicts: Sequence[Verdict],
    invalid: str | None,
    test: str = "",
) -> list[Measurement]:
    """The record's rows of one load: every metric that the windows have, with the worst verdict of its floors.

    `test` is the user's test that ran it, empty for the built-in check.
    """
    found = []
    for metric in METRICS.values():
        per_start = [[window[metric.name] for window in start if metric.name in window] for start in starts]
        samples = [sample for start in per_start for sample in start]
        if not samples:
            continue
        mine = [one for one in verdicts if one.bound.metric == metric.name]
        worst = min(mine, key=lambda one: _WORST.index(one.verdict), default=None)
        found.append(
            Measurement(
                metric=metric.name,
                unit=metric.unit,
                direction="higher" if metric.higher else "lower",
                load=profile.name,
                samples=[round(sample, 4) for sample in samples],
                starts=[len(start) for start in per_start],
                median=round(median(median(start) for start in per_start if start), 4),
                spread=round(mad(samples), 4),
                verdict=worst.verdict if worst else "invalid" if invalid else "recorded",
                floor=worst.bound.to_json() if worst else None,
                note=worst.text if worst else invalid or "",
                method=profile.method,
                test=test,
            )
        )
    return found
