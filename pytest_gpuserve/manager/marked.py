"""Floors that tests' own marks set: what to do where one could not be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.measuring import Measured
    from pytest_gpuserve.matrix.types import Floor
    from pytest_gpuserve.model.cell import Cell

__all__ = ["MADE_UP", "next_steps"]

MADE_UP = (
    "throughput_floor not judged: the simulation has one made-up speed for all cells; "
    "--gpu-sim-scenario FILE gives them speeds"
)
# A server cannot be exchanged under the test that holds it.
_ONE_START = (
    "in a test of your own the server is not started again: write this floor into the matrix, whose check does that, "
    "or leave it more room"
)


def next_steps(manager: Manager, cell: Cell, measured: Measured, floors: Sequence[Floor]) -> list[str]:
    """What the user can do about the verdicts that are open, none of them twice."""
    missing = {one.bound.where for one in measured.verdicts if one.bound.missing}
    steps = [_ONE_START] if measured.undecided else []
    steps += [
        _without_reference(manager, cell, measured, floor)
        for floor in floors
        if floor.ratio is not None and f"{floor.where.file}:{floor.where.line}" in missing
    ]
    return [step for step in dict.fromkeys(steps) if step]


def _without_reference(manager: Manager, cell: Cell, measured: Measured, floor: Floor) -> str:
    """The next step where the cell that a ratio compares with gave nothing; empty where the verdict says all."""
    plan, load = manager.plan, measured.profile.name
    axes = floor.reference(cell.axes, plan.matrices[cell.matrix].baseline)
    other = plan.cell_with(cell, axes) if axes is not None else None
    if other is None:
        return "this run has no such cell: an include of the matrix makes it, or --gpu-strategy full"
    if other.not_applicable:
        return f"{other.id} is skipped: {other.not_applicable}"
    if manager.runs(other.id) and other.id not in plan.references_of(cell):
        return (
            f"{other.id} runs after this cell, as all cells do after their baseline, and one of two that are compared "
            "with each other: let the mark stand in that cell, and compare it with this one"
        )
    record = manager.result_of(other.id)
    if record is not None and (record.failure is not None or any(row["load"] == load for row in record.measurements)):
        return ""
    nothing = f"nothing in this run measures {load} in {other.id}: let this test run there"
    if load not in plan.loads:  # one with changes: the check has none of those
        return nothing
    # The check's rows have no test.
    checked = record is not None and any(not row.get("test") for row in record.measurements)
    steps = [
        "" if checked else "add gpuserve/suite.py::test_throughput to the command line",
        "" if floor.load else f'write load="{load}" in the mark',
    ]
    told = " and ".join(step for step in steps if step)
    return f"{nothing}, or {told}" if told else nothing
