"""Earlier measurements of the same cell: same matrix, axes, GPUs by name and method, by its own throughput check."""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.measure.floors import Past

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.model.cell import Cell

__all__ = ["past_of", "runs_before"]

# What was disturbed, or was itself too slow, is no measure of what the cell can do. Inconclusive ones count: were only
# the lucky half of noisy runs kept, each would raise the floor of the next.
_USABLE = ("ok", "recorded", "inconclusive")
# Outcomes of cells that nothing failed in. Where throughput is the only check, the first run of all is `skipped`.
_SOUND = ("passed", "xpassed", "skipped")


def runs_before(
    report: Path, this_run: Path, skipped: Callable[[str], object] = warnings.warn
) -> Iterator[dict[str, Any]]:
    """The records in a report folder, newest first, without this run's.

    One that cannot be read, or is none of ours, is left out, and `skipped` is told which, and why.
    """
    for path in sorted((report / "runs").glob("*/run.json"), reverse=True):
        if path.parent.is_symlink() or path.parent.resolve() == this_run.resolve():
            continue
        try:
            run = json.loads(path.read_bytes())
            _check(run)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            skipped(f"{path}: left out of the history: not a record of a run: {error}")
            continue
        yield run


def _check(run: object) -> None:
    """ValueError, naming the place, unless all that is read below has the type that it must have."""
    (record,) = _objects([run], "the record")
    if "cells" not in record:
        raise ValueError("it has no cells")
    for cell in _objects(record["cells"], "cells"):
        _objects(cell.get("gpus"), "gpus of a cell")
        for row in _objects(cell.get("measurements"), "measurements of a cell"):
            middle = row.get("median")
            if middle is not None and (type(middle) not in (int, float) or not math.isfinite(middle)):
                raise ValueError(f"the median of a measurement must be a number, got {middle!r}")


def _objects(value: object, name: str) -> list[dict[str, Any]]:
    """A list of objects; none where a field is missing or null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{name} must be objects, got {str(value)[:40]!r}")
    return value


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
    """The newest `last` medians of `metric` in `load`; `gpus` are the names of the cell's GPUs.

    Only of cells in which nothing failed: a slow run must not become the history that lets the next slow one pass. And
    only the built-in check's: a user's test may measure under conditions of its own.
    """
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
                    and not one.get("test")
                    and one.get("median") is not None
                ]
    return Past(medians=tuple(found[:last]), runs=seen)


def _same(record: Mapping[str, Any], cell: Cell) -> bool:
    identity = (record.get("arch"), record.get("model"), record.get("axes"))
    # Another matrix may mean other flags by the same names. A record from elsewhere may name none.
    same_matrix = (record.get("matrix") or cell.matrix) == cell.matrix
    return record.get("outcome") in _SOUND and same_matrix and identity == (cell.arch, cell.model.name, dict(cell.axes))
