"""What a test item wants of the manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.manager.need import Need
from pytest_gpuserve.markers import gpus_wanted
from pytest_gpuserve.model.cell import Cell
from pytest_gpuserve.schedule import without_cell
from pytest_gpuserve.suite import LAST

if TYPE_CHECKING:
    import pytest

__all__ = ["Work", "cell_of", "name_of", "stage_of", "stops_server", "work_of"]

_SERVER, _GPUS = "sglang_server", "gpus"


@dataclass(frozen=True, slots=True)
class Work:
    """One check: its cell, what it needs, and the name it has in reports."""

    cell: Cell
    need: Need
    name: str


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell the item runs in; None for an item that is not ours, and for one whose marks match no cell."""
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("gpu_cell") if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


def _fixtures(item: pytest.Item) -> list[str]:
    names: list[str] = getattr(item, "fixturenames", [])
    return names


def stage_of(item: pytest.Item) -> tuple[int, int]:
    """(stage, order) within the cell: the suite's checks, the project's tests, shutdown; then bare leases."""
    names = _fixtures(item)
    if _SERVER not in names and _GPUS in names:
        return 1, 0
    if not item.nodeid.startswith("gpuserve/"):
        return 0, 1
    return 0, 2 if stops_server(item) else 0


def stops_server(item: pytest.Item) -> bool:
    """True for the suite's check that ends the server itself."""
    return item.nodeid.startswith("gpuserve/") and getattr(item, "originalname", "") == LAST


def name_of(nodeid: str, cell_id: str) -> str:
    """`ready` for the suite's `test_ready[…]`; a project's test by its own name, with its other parameters."""
    path, bracket, inside = without_cell(nodeid, cell_id).partition("[")
    name = path.rpartition("::")[2]
    if nodeid.startswith("gpuserve/"):
        return name.removeprefix("test_").replace("_", "-")
    return f"{name}{bracket}{inside}"


def work_of(item: pytest.Item) -> Work | None:
    """None for an item that is not ours."""
    cell = cell_of(item)
    if cell is None:
        return None
    names = _fixtures(item)
    if _SERVER in names:
        need = Need.server(cell)
    elif _GPUS in names:
        need = Need.lease(gpus_wanted(item.iter_markers("gpus"), cell.gpus))
    else:
        need = Need.nothing()
    return Work(cell, need, name_of(item.nodeid, cell.id))
