"""`--gpu-plan`: what a run would do, without doing any of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpuserve import schedule, verdict
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.model.knownbad import Mode
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.store import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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


def _history(report: Path) -> dict[str, float]:
    """Seconds of each cell in the latest run under the report directory; empty if there is none."""
    try:
        cells = read_run(report)["cells"]
    except (GpuserveError, OSError):
        return {}
    return {cell["id"]: float(total) for cell in cells if (total := (cell.get("timings") or {}).get("total"))}


def plan_lines(plan: Plan, selected: Sequence[str]) -> Iterator[str]:
    """The plan as text: one line a cell in launch order, then what is left out and why, then the totals."""
    cells = [plan.by_id[one] for one in selected]
    history = _history(plan.settings.report)
    width = max(len(cell.id) for cell in cells)
    for cell in cells:
        gpus = number(cell.gpus, "GPU")
        took = _time(schedule.estimate(cell, history))
        yield f"{cell.id:<{width}}  {gpus:<6} {took:>7}  {expected(cell, plan)}"
        for note in cell.notes:
            yield f"{'':<{width}}  note: {note}"
    for left in plan.left_out:
        yield f"left out: {left.id}: {left.reason}{f' ({left.where})' if left.where else ''}"
    launched = [cell for cell in cells if not expected(cell, plan).startswith("skipped")]
    available = len(plan.gpus) or max((cell.gpus for cell in cells), default=1)
    known = sum(cell.id in history for cell in launched)
    yield (
        f"{number(len(cells), 'cell')}, {number(len(launched), 'server start')}, about "
        f"{_time(schedule.makespan(launched, available, 1, history))} one after another, "
        f"{_time(schedule.makespan(launched, available, available, history))} with -n auto "
        f"({known} of {len(launched)} from the last run's times, the others guessed)"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
