"""Records of older schemas, brought up to the current one step by step; newer ones are refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import __version__
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.record import SCHEMA
from pytest_gpuserve.report.shape import cell_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["STEPS", "upgrade"]

Record = dict[str, Any]
_REQUIRED = ("id", "arch", "model", "axes", "outcome")


def upgrade(record: Record, source: str, steps: Mapping[int, Callable[[Record], Record]] | None = None) -> Record:
    """`record` in the current schema. UsageError, naming `source`, if it is newer, unknown or not a run's record."""
    steps = STEPS if steps is None else steps
    schema = record.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise UsageError(f"{source}: not a record of gpuserve: it has no number under 'schema'.")
    if schema > SCHEMA:
        raise UsageError(
            f"{source}: written with schema {schema}, and pytest-gpuserve {__version__} reads up to {SCHEMA}. "
            "Upgrade pytest-gpuserve here, or compare with the version that wrote it."
        )
    _check(record, source)
    while schema < SCHEMA:
        if schema not in steps:
            raise UsageError(f"{source}: schema {schema} is not one that any pytest-gpuserve wrote.")
        record = steps[schema](record)
        schema = record["schema"]
    for number, cell in enumerate(record["cells"]):
        problem = cell_problem(cell)
        if problem:
            raise UsageError(f"{source}: cells[{number}] ({cell['id']}): {problem}.")
    return record


def _check(record: Record, source: str) -> None:
    """What every schema has had, and the steps lean on."""
    cells = record.get("cells")
    if not isinstance(cells, list):
        raise UsageError(f"{source}: not a record of a run: 'cells' is not a list.")
    for number, cell in enumerate(cells):
        missing = _REQUIRED if not isinstance(cell, dict) else [name for name in _REQUIRED if name not in cell]
        if missing:
            raise UsageError(f"{source}: cells[{number}] lacks {', '.join(missing)}.")
        if not isinstance(cell["axes"], dict):
            raise UsageError(f"{source}: cells[{number}] ({cell['id']}): its axes are not a mapping of axes to levels.")


def _from_0(record: Record) -> Record:
    """Schema 0, the least a record can be: each cell's id, arch, model, axes and outcome.

    What results of other harnesses are converted into. A failure may have only a kind. The baseline is taken from the
    cell called `…-baseline`, else it is each axis' most frequent level (one-at-a-time makes that the baseline).
    """
    baselines = _baselines(record["cells"])
    cells = []
    for cell in record["cells"]:
        full = {"baseline": baselines[cell["arch"], cell["model"]], "known_bad": None, "reason": "", "failure": None}
        full |= {"timings": {}, "measurements": [], "gpus": [], "flags": {}, "env": {}, "server_starts": 1} | cell
        full["failure"] = _failure(cell.get("failure"))
        cells.append(full)
    top = {"simulated": False, "complete": True, "started": "", "finished": "", "command": [], "versions": {}}
    top |= {
        "taken_for": {},
        "driver": {},
        "host": "",
        "gpus": [],
        "matrices": [],
        "checks": [],
        "server_starts": len(cells),
    }
    outcomes = dict(Counter(cell["outcome"] for cell in cells))
    return top | {"outcomes": outcomes} | record | {"schema": 1, "cells": cells}


def _failure(given: Mapping[str, Any] | None) -> Record | None:
    if not given:
        return None
    kind = Kind(given.get("kind", Kind.CRASH))
    phase = Phase(given.get("phase", Phase.SERVING))
    made = Failure.of(kind, phase, str(given.get("message", kind)), text=str(given.get("text", "")))
    return made.to_json() | dict(given)


def _baselines(cells: list[Record]) -> dict[tuple[str, str], dict[str, str]]:
    named: dict[tuple[str, str], dict[str, str]] = {}
    levels: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for cell in cells:
        key = cell["arch"], cell["model"]
        for axis, level in cell["axes"].items():
            levels[key][axis][level] += 1
        if str(cell["id"]).endswith("-baseline"):
            named[key] = cell["axes"]
    frequent = {
        key: {axis: counts.most_common(1)[0][0] for axis, counts in axes.items()} for key, axes in levels.items()
    }
    return {(cell["arch"], cell["model"]): {} for cell in cells} | frequent | named


STEPS: Mapping[int, Callable[[Record], Record]] = {0: _from_0}
