"""Preflight: SGLang's own arguments asked about the cells of a plan; nothing is launched and no GPU is needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.manager.prepare import server_variables
from pytest_gpuserve.manager.weights import local_path
from pytest_gpuserve.models.materialise import materialise
from pytest_gpuserve.preflight.command import Request, ask, write_records
from pytest_gpuserve.preflight.record import failure_of
from pytest_gpuserve.serve.spawn import inherited, left_out

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell, ModelSpec
    from pytest_gpuserve.model.failure import Failure

__all__ = ["Preflights", "request_of"]


def request_of(plan: Plan, cells: Sequence[Cell]) -> Request:
    """What is asked about `cells`: a folder a model without weights, and the environment that a server would have.

    A model that is given as a path and is not here has no folder: its cells are then skipped.
    """
    variables = server_variables(plan.settings)
    python = plan.settings.python
    env, dropped = inherited(os.environ, variables, python=python)
    folders: dict[str, Path] = {}
    for spec in {cell.model.name: cell.model for cell in cells}.values():
        folder = _folder(spec, python)
        if folder is not None:
            folders[spec.name] = folder
    return Request(
        cells=cells,
        python=python,
        env=env,
        notes=(left_out(dropped),) if dropped else (),
        versions=plan.versions,
        model_dirs=folders,
        entries=plan.entries,
    )


def _folder(spec: ModelSpec, python: str) -> Path | None:
    if spec.path is not None:
        return local_path(spec.path)
    return materialise(spec, python=python, env={}, weights=False)


class Preflights:
    """The answers for the cells of one session, asked all at once when the first is wanted; then `notes` on how."""

    def __init__(self, plan: Plan, selected: Sequence[str]) -> None:
        self._plan = plan
        self._selected = selected
        self._answers: dict[str, dict[str, Any]] | None = None
        self.notes: Sequence[str] = ()

    def answer(self, cell: Cell) -> dict[str, Any]:
        """The cell's entry of the record (see `preflight.record`); the record is in the run's `preflight.json`."""
        if self._answers is None:
            cells = [self._plan.by_id[one] for one in self._selected]
            request = request_of(self._plan, cells)
            self.notes = request.notes
            records = ask(request)
            assert self._plan.folder is not None
            write_records(self._plan.folder / "preflight.json", records)
            self._answers = {one["id"]: one for record in records for one in record["cells"]}
        return self._answers[cell.id]

    def failure(self, cell: Cell) -> Failure | None:
        """Why a launch of the cell would fail, as far as SGLang's arguments know."""
        return failure_of(self.answer(cell))
