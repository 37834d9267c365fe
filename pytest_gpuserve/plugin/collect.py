"""Collection: the built-in checks, one test a cell, and the order that starts each cell's server once."""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve import schedule
from pytest_gpuserve.engine import canonical_fact
from pytest_gpuserve.manager.measuring import loads_of
from pytest_gpuserve.manager.prepare import elsewhere
from pytest_gpuserve.markers import arguments, gpus_wanted, throughput_floors
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import FIXED_FACTS, PREFIXES
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.predicate import Predicate
from pytest_gpuserve.plugin.work import cell_of, stage_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.matrix.types import Floor, Matrix
    from pytest_gpuserve.model.cell import Cell

__all__ = ["BUILT_IN", "Collection"]

BUILT_IN = "gpuserve"
THROUGHPUT = "test_throughput"
CHECK = f"{BUILT_IN}/suite.py::{THROUGHPUT}"


def _is_no_axis(name: str) -> bool:
    return name in FIXED_FACTS or name.startswith(PREFIXES)


class _BuiltIn(pytest.Module):
    """The suite as a module of its own, found by no rule of the project's, such as python_files or python_functions."""

    def _getobj(self) -> Any:
        return importlib.import_module(self.name)

    def funcnamefilter(self, name: str) -> bool:
        collection = self.config.pluginmanager.get_plugin("gpuserve-collection")
        # Without a floor there is nothing to measure: then the check is not there, rather than skipped in every cell.
        return name.startswith("test_") and (name != THROUGHPUT or bool(collection and collection.measured))

    def classnamefilter(self, name: str) -> bool:  # noqa: ARG002
        return False


def _suite_of(plan: Plan) -> str:
    return "pytest_gpuserve.preflight_suite" if plan.settings.preflight else "pytest_gpuserve.suite"


class Collection:
    """Hooks of the process that collects: each xdist worker, or the one process without xdist.

    `plan` is the run's; once all is collected, with what marks of the tests ask for: the same in every worker.
    """

    def __init__(self, config: pytest.Config, plan: Plan) -> None:
        self.plan = plan
        self._marked = plan
        self._ratios: dict[pytest.Item, tuple[Floor, ...]] = {}
        self._ids = [cell.id for cell in plan.cells]
        self._suite = _suite_of(plan)
        self._session: pytest.Session | None = None
        self._asked: list[str] = self._take_arguments(config)

    def _take_arguments(self, config: pytest.Config) -> list[str]:
        """Which built-in checks are asked for: all without paths, else those whose node ids stand among them.

        Without paths and without `testpaths` the project's own tests stay out: crawling the current directory would
        import whatever lies there.
        """
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            if config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR:
                config.args = []
            return [BUILT_IN]
        ours = [arg for arg in config.args if arg.split("/")[0].split("::")[0] == BUILT_IN and not Path(arg).exists()]
        if ours:
            config.args = [arg for arg in config.args if arg not in ours]
        return ours

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """The session finds the suite after all else: what it measures depends on marks of the project's tests."""
        report = yield
        if isinstance(collector, pytest.Session) and self._asked:
            self._session = collector
            path = Path(importlib.import_module(self._suite).__file__ or "")
            node = _BuiltIn.from_parent(
                collector, path=path, name=self._suite, nodeid=f"{BUILT_IN}/{self._suite.rpartition('.')[2]}.py"
            )
            report.result = [*report.result, node]
        return report

    @cached_property
    def measured(self) -> list[Cell]:
        """The cells of the throughput check: what the matrix' floors need, and marks of the tests so far."""
        if self.plan.settings.preflight or self._session is None:
            return []
        plan = self._marking(self._session.items)
        return [cell for cell in self.plan.cells if loads_of(plan, cell)]

    def _marking(self, items: Iterable[pytest.Item]) -> Plan:
        """The plan with the ratios that marks of these tests set, its cells not in order yet."""
        marked: dict[str, tuple[Floor, ...]] = {}
        for item in items:
            if not item.nodeid.startswith(f"{BUILT_IN}/") and (ratios := self._ratios_of(item)):
                cell = cell_of(item)
                assert cell is not None
                marked[cell.id] = marked.get(cell.id, ()) + ratios
        if marked != self._marked.marked:
            self._marked = self.plan.marking(marked)
        return self._marked

    def _ratios_of(self, item: pytest.Item) -> tuple[Floor, ...]:
        if item.get_closest_marker("throughput_floor") is None or cell_of(item) is None:
            return ()
        if item not in self._ratios:
            self._ratios[item] = ()
            # A parameter's wrong mark is told when its test runs.
            with suppress(pytest.fail.Exception):
                self._ratios[item] = tuple(floor for floor in throughput_floors(item) if floor.ratio is not None)
        return self._ratios[item]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that uses a fixture of ours, through whatever other fixtures, runs once a cell."""
        # A wrong mark is told here, as this test's own error: what is raised later ends pytest itself.
        self._check_floors(metafunc.definition, metafunc.fixturenames)
        gpus_wanted(metafunc.definition.iter_markers("gpus"), 1)
        if "gpu_cell" in metafunc.fixturenames:
            cells = self._cells_for(metafunc.definition)
            ids = self._ids if len(cells) == len(self._ids) else [cell.id for cell in cells]
            metafunc.parametrize("gpu_cell", cells, ids=ids, indirect=True, scope="function")

    def _cells_for(self, definition: pytest.Item) -> Sequence[Cell]:
        if definition.nodeid == CHECK:
            return self.measured
        marks = list(definition.iter_markers("gpu_cells"))
        if not marks:
            return self.plan.cells
        predicates = []
        for mark in marks:
            _, wanted = arguments(mark)
            unknown = [name for name in wanted if not self._is_fact(name)]
            if unknown:
                known = ", ".join([*self.plan.axes, *FIXED_FACTS, *(f"{prefix}NAME" for prefix in PREFIXES)])
                pytest.fail(
                    f"@pytest.mark.gpu_cells knows no {', '.join(unknown)} here; it knows {known}", pytrace=False
                )
            facts = {canonical_fact(name): value for name, value in wanted.items()}
            predicates.append(self._known(Predicate.of(facts)))
        return [
            cell
            for cell, facts in ((cell, facts_of(cell)) for cell in self.plan.cells)
            if all(predicate.matches(facts) for predicate in predicates)
        ]

    def _is_fact(self, name: str) -> bool:
        return _is_no_axis(name) or name in self.plan.axes or any(name in matrix.axes for matrix in self._elsewhere)

    @cached_property
    def _elsewhere(self) -> list[Matrix]:
        return elsewhere(self.plan.settings.rootdir)

    def _known(self, predicate: Predicate) -> Predicate:
        """The predicate, unless it names a level that no matrix has: its test would never run, silently."""
        for term in predicate.terms:
            if not _is_no_axis(term.name):
                self._require_levels("gpu_cells", term.name, term.values)
        return predicate

    def _require_levels(self, mark: str, axis: str, wanted: Iterable[str]) -> None:
        levels = {level for matrix in self.plan.matrices.values() for level in matrix.axes.get(axis, ())}
        if levels.issuperset(wanted):
            return
        levels |= {level for matrix in self._elsewhere for level in matrix.axes.get(axis, ())}
        for level in sorted({*wanted} - levels):
            close = did_you_mean(level, sorted(levels))
            pytest.fail(f"@pytest.mark.{mark}: no matrix has a level {level!r} of {axis}{close}", pytrace=False)

    def _check_floors(self, node: pytest.Item, fixtures: Sequence[str]) -> None:
        """Fails the test if a `throughput_floor` of it could never hold for anything."""
        floors = throughput_floors(node)
        if floors and "load" not in fixtures:
            pytest.fail(
                "@pytest.mark.throughput_floor is about the fixture `load`, which this test does not use", pytrace=False
            )
        for floor in floors:
            if floor.load and floor.load not in self.plan.loads:
                loads = {*self.plan.loads, *(load for matrix in self._elsewhere for load in matrix.loads)}
                if floor.load not in loads:
                    close = did_you_mean(floor.load, sorted(loads))
                    pytest.fail(
                        f"@pytest.mark.throughput_floor: no matrix has a load {floor.load!r}{close}", pytrace=False
                    )
            for axis, level in (floor.of or {}).items():
                if axis not in self.plan.axes and not any(axis in matrix.axes for matrix in self._elsewhere):
                    close = did_you_mean(axis, self.plan.axes)
                    pytest.fail(f"@pytest.mark.throughput_floor: no matrix has an axis {axis!r}{close}", pytrace=False)
                self._require_levels("throughput_floor", axis, [level])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A parameter's own marks are not seen before it has become a test."""
        if cell_of(item) is not None:
            self._check_floors(item, getattr(item, "fixturenames", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """What is not ours or has no cell is deselected; the rest is ordered by cell.

        So is a throughput check that would have measured for nothing but a test that `-k` took out.
        """
        marked = self._marking(items)
        self.plan = self.plan if marked is self.plan else marked.ordered()
        rank = {cell.id: place for place, cell in enumerate(self.plan.cells)}
        idle = {cell.id for cell in self.measured if not loads_of(self.plan, cell)}
        mine: list[tuple[pytest.Item, Cell]] = []
        others: list[pytest.Item] = []
        for item in items:
            cell = cell_of(item)
            if cell is None or not self._is_asked(item) or (cell.id in idle and item.nodeid.startswith(f"{CHECK}[")):
                others.append(item)
            else:
                mine.append((item, cell))
        if others:
            config.hook.pytest_deselected(items=others)

        def place(work: tuple[pytest.Item, Cell]) -> schedule.Place:
            item, cell = work
            return schedule.Place(rank[cell.id], *stage_of(item))

        items[:] = [item for item, _ in schedule.arrange(mine, place)]

    def _is_asked(self, item: pytest.Item) -> bool:
        if self._asked == [BUILT_IN] or not item.nodeid.startswith(f"{BUILT_IN}/"):
            return True
        return any(_selects(asked, item.nodeid) for asked in self._asked)


def _selects(asked: str, nodeid: str) -> bool:
    """True if the command line's `asked` is `nodeid`, a part of it, or the same test for all cells."""
    return nodeid == asked or nodeid.startswith((f"{asked}::", f"{asked}[", f"{asked}/"))
