"""A cell over the runs of a report folder: outcome, speed, and where a step lies.

The rule of a step, said in the output: the medians of the (up to five) runs before and after differ by more than 15 %,
which is more than two starts of one server differ by, and by more than four times the larger median absolute deviation.
With fewer than two runs on a side nothing is called a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.measure.stats import BETWEEN_STARTS, mad
from pytest_gpuserve.report.describe import blame

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Night", "history_of", "moved_between", "steps"]

_WINDOW = 5
_ENOUGH = 2
_MADS = 4.0


@dataclass(frozen=True, slots=True)
class Night:
    """What one run says of a cell. `speeds` holds the median of each load's output throughput, in tok/s."""

    started: str
    outcome: str
    failure: str
    speeds: Mapping[str, float]
    versions: Mapping[str, str]
    simulated: bool


def history_of(runs: Iterable[Mapping[str, Any]], cell_id: str) -> list[Night]:
    """What each of `runs`, oldest first, says of the cell; runs without it are left out."""
    nights = []
    for run in runs:
        for cell in run["cells"]:
            if cell["id"] == cell_id:
                versions = {**(run.get("driver") or {}), **(run.get("versions") or {})}
                nights.append(
                    Night(
                        started=str(run.get("started") or ""),
                        outcome=cell["outcome"],
                        failure=blame(cell),
                        speeds=_speeds(cell),
                        versions={name: str(version) for name, version in versions.items()},
                        simulated=bool(run.get("simulated")),
                    )
                )
    return nights


def _speeds(cell: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(item["load"]): float(item["median"])
        for item in cell.get("measurements") or ()
        if item.get("metric") == "output_throughput" and item.get("median") is not None and not item.get("test")
    }


def moved_between(before: Night, after: Night) -> list[str]:
    """The parts of the stack that differ between two runs, as `torch 2.13.0 → 2.14.1`."""
    names = [*before.versions, *(name for name in after.versions if name not in before.versions)]
    return [
        f"{name} {before.versions.get(name, '(absent)')} → {after.versions.get(name, '(absent)')}"
        for name in names
        if before.versions.get(name) != after.versions.get(name)
    ]


def steps(values: Sequence[float | None]) -> list[int]:
    """The indices at which a series steps to another level, by the rule that the module states.

    None marks a run that measured nothing. Of neighbouring indices that all fit, the one whose two levels describe the
    values best stands for the step.
    """
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    series = [value for _, value in known]
    places = [place for place in range(_ENOUGH, len(series) - _ENOUGH + 1) if _steps_at(series, place)]
    found = []
    while places:
        # Neighbouring places that all fit are one step.
        group = [place for index, place in enumerate(places) if place == places[0] + index]
        places = places[len(group) :]
        around = series[max(group[0] - _WINDOW, 0) : group[-1] + _WINDOW]
        start = max(group[0] - _WINDOW, 0)
        found.append(min(group, key=lambda place: _misfit(around[: place - start]) + _misfit(around[place - start :])))
    return [known[place][0] for place in found]


def _steps_at(series: Sequence[float], place: int) -> bool:
    before, after = series[max(place - _WINDOW, 0) : place], series[place : place + _WINDOW]
    noise = max(BETWEEN_STARTS * median(before), _MADS * max(mad(before), mad(after)))
    return abs(median(after) - median(before)) > noise


def _misfit(part: Sequence[float]) -> float:
    """How badly one level describes these values: the sum of their distances from their median."""
    middle = median(part)
    return sum(abs(value - middle) for value in part)
