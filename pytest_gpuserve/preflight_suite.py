"""What `--gpu-preflight` collects instead of the suite: one test a cell, nothing launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpuserve.failing import ServerFailed

if TYPE_CHECKING:
    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.model.cell import Cell

__all__ = ["test_preflight"]


def test_preflight(gpu_cell: Cell, gpuserve_manager: Manager) -> None:
    """SGLang's own arguments accept the cell. That is not "supported": kernels may still refuse it when launched."""
    answer = gpuserve_manager.preflights.answer(gpu_cell)
    if answer["outcome"] == "skipped":
        pytest.skip(answer["reason"])
    failure = gpuserve_manager.preflights.failure(gpu_cell)
    record = gpuserve_manager.state(gpu_cell).record
    record.resolved = answer["settings"]
    record.notes.append("preflight: only SGLang's arguments were asked; accepted is not supported")
    record.notes += gpuserve_manager.preflights.notes
    if failure is not None:
        raise ServerFailed(failure)
