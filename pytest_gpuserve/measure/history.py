"""Earlier measurements of the same cell: same axes, same GPUs by name, same method."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.measure.floors import Past

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.model.cell import Cell

__all__ = ["past_of", "runs_before"]

# What was disturbed, or was itself too slow, is no measure of what the cell can do.
_USABLE = frozenset({"ok", "recorded", "inconclusive"})


def runs_before(report: Path, this_run: Path) -> Iterator[dict[str, Any]]:
    """The records in a report folder, newest first, without this run's; what cannot be read is left out."""
    for path in sorted((report / "runs").glob("*/run.json"), reverse=True):
        if path.parent.is_symlink() or path.parent.resolve() == this_run.resolve():
            continue
        try:
            run = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(run, dict):
            yield run


def past_of(
    runs: Iterator[dict[str, Any]],
    cell: Cell,
    *,
    load: str,
    metric: str,
    method: str,
    gpus: Sequence[str],
    simulated: bool,
    last: int,
) -> Past:
    """The newest `last` medians of `metric` in `load`; `gpus` are the names of the cell's GPUs."""
    found: list[float] = []
    seen = 0
    for run in runs:
        if len(found) == last:
            break
        seen += 1
        if bool(run.get("simulated")) is not simulated:
            continue
        for record in run.get("cells") or ():
            if _same(record, cell) and sorted(str(gpu.get("name")) for gpu in record.get("gpus") or ()) == sorted(gpus):
                found += [
                    float(one["median"])
                    for one in record.get("measurements") or ()
                    if (one.get("load"), one.get("metric"), one.get("method")) == (load, metric, method)
                    and one.get("verdict") in _USABLE
                    and one.get("median") is not None
                ]
    return Past(medians=tuple(found[:last]), runs=seen)


def _same(record: Mapping[str, Any], cell: Cell) -> bool:
    return (record.get("arch"), record.get("model"), record.get("axes")) == (
        cell.arch,
        cell.model.name,
        dict(cell.axes),
    )
