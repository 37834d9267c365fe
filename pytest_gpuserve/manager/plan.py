"""What a run is: decided once, in the controller, and the same in every xdist worker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import schedule
from pytest_gpuserve.matrix.types import BUILTIN_LOADS
from pytest_gpuserve.measure.floors import Needs, asked_by, needs_of
from pytest_gpuserve.model.versions import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_gpuserve.matrix.expand import LeftOut
    from pytest_gpuserve.matrix.scenario import Scenario
    from pytest_gpuserve.matrix.types import Floor, Matrix
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.gpu import Gpu
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.model.settings import Settings
    from pytest_gpuserve.model.versions import TakenFor

__all__ = ["Plan", "Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """`index` of `of` machines, counted from 1; `whole` are the ids of the cells of all of them, in their order."""

    index: int
    of: int
    whole: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in a run's record: `gpuserve merge` finds by it what is missing."""
        return {"index": self.index, "of": self.of, "whole": list(self.whole)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cells in launch order, and what is known of the machine and the stack under test.

    `gpus` are those this run may use; `probes` says by arch how a process reads them (`Probe.spec()`). `entries` holds,
    by cell id, the known-bad entries that match, most specific first; cells without any are left out. `folder` is the
    run's folder, None where nothing is launched. `started` is an aware UTC time as ISO text, `began` the same moment
    on the clock that nobody sets (`time.monotonic`, the same in every process). `marked` are the ratios that marks of
    collected tests set, by the id of the cell they run in. `versions` are as installed; `taken_for` says what builds
    without a version count as. `remarks` are for the header and the plan.
    """

    settings: Settings
    run_id: str
    started: str
    began: float
    cells: tuple[Cell, ...]
    matrices: Mapping[str, Matrix]
    left_out: tuple[LeftOut, ...]
    entries: Mapping[str, tuple[KnownBad, ...]]
    versions: Mapping[str, str]
    taken_for: Mapping[str, TakenFor] = field(default_factory=dict)
    driver: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    probes: Mapping[str, dict[str, Any]]
    lock_dir: Path | None
    scenario: Scenario | None = None
    folder: Path | None = None
    owners: tuple[int, ...] = field(default=())
    marked: Mapping[str, tuple[Floor, ...]] = field(default_factory=dict)
    shard: Shard | None = None
    remarks: tuple[str, ...] = ()

    def version(self, name: str) -> str:
        """The version that this distribution counts as; empty if it is not there."""
        return counted(self.versions, self.taken_for).get(name, "")

    @property
    def simulated(self) -> bool:
        """True if GPUs and servers are simulated: every report must say so."""
        return self.settings.sim is not None

    @property
    def made_up(self) -> bool:
        """True in a simulation without a scenario: one made-up speed for all cells, of which nothing is asked."""
        return self.simulated and self.settings.sim_scenario is None

    @property
    def judges(self) -> bool:
        """True if floors are held against what is measured."""
        return self.settings.floors == "check" and not self.made_up

    def ordered(self) -> Plan:
        """The same with its cells in launch order."""
        references = {name: needs.references for name, needs in self._needs.items()}
        found = replace(self, cells=schedule.in_launch_order(self.cells, references))
        vars(found).update(_asked=self._asked, _needs=self._needs)  # the same cells: nothing to find out again
        return found

    def marking(self, marked: Mapping[str, tuple[Floor, ...]]) -> Plan:
        """The same, its cells not in order yet, where tests compare their cells with others by marks of their own.

        This plan itself where that changes nothing.
        """
        if not self.judges or marked == self.marked:
            return self
        found = replace(self, marked=marked)
        vars(found).update(_asked=self._asked)
        return found

    @cached_property
    def by_id(self) -> dict[str, Cell]:
        """The cells by their ids."""
        return {cell.id: cell for cell in self.cells}

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes of all matrices."""
        return tuple(dict.fromkeys(axis for matrix in self.matrices.values() for axis in matrix.axes))

    @cached_property
    def loads(self) -> tuple[str, ...]:
        """The names of all loads: the built-in ones and those of all matrices."""
        return tuple(dict.fromkeys((*BUILTIN_LOADS, *(load for one in self.matrices.values() for load in one.loads))))

    @cached_property
    def baselines(self) -> dict[tuple[str, str, str], str]:
        """The baseline's id by matrix, arch and model."""
        return {(cell.matrix, cell.arch, cell.model.name): cell.id for cell in self.cells if cell.is_baseline}

    def baseline_of(self, cell: Cell) -> Cell | None:
        """The known-good cell of the same model and arch; None for a baseline, and where the matrix has none."""
        found = self.baselines.get((cell.matrix, cell.arch, cell.model.name))
        return None if found is None or cell.is_baseline else self.by_id[found]

    @cached_property
    def _by_axes(self) -> dict[tuple[Any, ...], Cell]:
        return {(cell.matrix, *cell.identity): cell for cell in self.cells}

    def cell_with(self, cell: Cell, axes: Mapping[str, str]) -> Cell | None:
        """The cell of the same model, arch and matrix with these levels; None if the run has none."""
        return self._by_axes.get((cell.matrix, cell.arch, cell.model.name, tuple(sorted(axes.items()))))

    @cached_property
    def _asked(self) -> dict[str, tuple[Floor, ...]]:
        """What the matrices' floors ask of each cell: whatever marks add, this stays."""
        return {
            cell.id: floors
            for cell in self.cells
            if (matrix := self.matrices.get(cell.matrix)) is not None and (floors := asked_by(matrix, cell))
        }

    @cached_property
    def _needs(self) -> dict[str, Needs]:
        return needs_of(self.cells, self.matrices, self.marked, self._asked)

    def needs_of(self, cell: Cell) -> Needs:
        """What the cell measures: for floors of its own, and for cells that are compared with it."""
        return self._needs.get(cell.id, Needs())

    @cached_property
    def _rank(self) -> dict[str, int]:
        return {cell.id: rank for rank, cell in enumerate(self.cells)}

    def references_of(self, cell: Cell) -> tuple[str, ...]:
        """The ids of the cells its floors compare it with, as far as they come before it: those it may wait for."""
        mine = self._rank[cell.id]
        return tuple(one for one in self.needs_of(cell).references if self._rank[one] < mine)

    def gpus_for(self, cell: Cell) -> tuple[Gpu, ...]:
        """The GPUs a server of this cell may be given: its arch, with enough memory."""
        least = cell.model.min_memory_gib * 2**30
        return tuple(
            gpu
            for gpu in self.gpus
            if gpu.arch == cell.arch and (gpu.memory_total is None or gpu.memory_total >= least)
        )
