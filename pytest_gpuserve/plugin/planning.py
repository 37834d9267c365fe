"""`--gpu-plan`: what a run would do, without doing any of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve import schedule, verdict
from pytest_gpuserve.measure.history import runs_before
from pytest_gpuserve.model.knownbad import Mode
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell

__all__ = ["expected", "plan_lines"]


def expected(cell: Cell, plan: Plan) -> str:
    """What the known-bad list makes of the cell: `pass`, `skipped: …`, `xfailed: crash in warmup, KB-0007 …`."""
    if cell.not_applicable:
        return f"skipped: {cell.not_applicable}"
    entries = plan.entries.get(cell.id, ())
    skip = verdict.skipped_by(entries)
    if skip is not None:
        return f"skipped: {skip.id} {skip.issue}"
    for entry in entries:
        if entry.mode is Mode.XFAIL:
            phases = "/".join(map(str, entry.expect.phases)) or "any phase"
            word = "xfailed" if entry.confirmed else "perhaps xfailed (only reported)"
            return f"{word}: {entry.expect.kind} in {phases}, {entry.id} {entry.issue}"
    return "pass"


# A cell with another outcome was not run to its end, so its time says nothing of the next start.
_TIMED = frozenset({Outcome.PASSED, Outcome.XPASSED, Outcome.XFAILED, Outcome.FAILED, Outcome.CHANGED})


def _history(plan: Plan) -> dict[str, float]:
    """Seconds of each cell in the newest run that ran it, under the report directory.

    The same cell of the same matrix: a run of another matrix, or of another share of this one, holds the times of its
    own cells only. And a simulation's times are of a simulation.
    """
    wanted = {(cell.matrix, *cell.identity): cell.id for cell in plan.cells}
    found: dict[str, float] = {}
    # There is no run of this plan yet, so none is left out.
    for run in runs_before(plan.settings.report, plan.settings.report / "runs" / "-", skipped=lambda _: None):
        if bool(run.get("simulated")) is not plan.simulated:
            continue
        for record in run.get("cells") or ():
            total = (record.get("timings") or {}).get("total")
            if record.get("outcome") in _TIMED and isinstance(total, (int, float)) and total > 0:
                axes = tuple(sorted((record.get("axes") or {}).items()))
                cell = wanted.get((record.get("matrix"), record.get("arch"), record.get("model"), axes))
                if cell is not None:
                    found.setdefault(cell, float(total))
        if len(found) == len(wanted):
            break
    return found


def plan_lines(plan: Plan, selected: Sequence[str]) -> Iterator[str]:
    """The plan as text: one line a cell in launch order, then what is left out and why, then the totals."""
    cells = [plan.by_id[one] for one in selected]
    history = _history(plan)
    width = max(len(cell.id) for cell in cells)
    for cell in cells:
        gpus = number(cell.gpus, "GPU")
        took = _time(schedule.estimate(cell, history))
        yield f"{cell.id:<{width}}  {gpus:<6} {took:>7}  {expected(cell, plan)}"
        for note in cell.notes:
            yield f"{'':<{width}}  note: {note}"
    for remark in plan.remarks:
        yield f"note: {remark}"
    for left in plan.left_out:
        yield f"left out: {left.id}: {left.reason}{f' ({left.where})' if left.where else ''}"
    launched = [cell for cell in cells if not expected(cell, plan).startswith("skipped")]
    available = len(plan.gpus) or max((cell.gpus for cell in cells), default=1)
    known = sum(cell.id in history for cell in launched)
    simulated = "SIMULATED " if plan.simulated else ""
    yield (
        f"{number(len(cells), 'cell')}, {number(len(launched), 'server start')}, about "
        f"{_time(schedule.makespan(launched, available, 1, history))} one after another, "
        f"{_time(schedule.makespan(launched, available, available, history))} with -n auto "
        f"({known} of {len(launched)} from the times of earlier {simulated}runs, the others guessed)"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
