"""What a check needs before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.model.cell import Cell

__all__ = ["Need"]


@dataclass(frozen=True, slots=True)
class Need:
    """A server of the cell, a lease of `gpus` GPUs without a server, or nothing but the cell's description."""

    has_server: bool
    gpus: int

    @classmethod
    def server(cls, cell: Cell) -> Need:
        """The cell's server and the GPUs it takes."""
        return cls(has_server=True, gpus=cell.gpus)

    @classmethod
    def lease(cls, gpus: int) -> Need:
        """GPUs alone."""
        return cls(has_server=False, gpus=gpus)

    @classmethod
    def nothing(cls) -> Need:
        """Neither: what is running is left alone."""
        return cls(has_server=False, gpus=0)
