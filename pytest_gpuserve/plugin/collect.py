"""Collection: the built-in checks, one test a cell, and the order that starts each cell's server once."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve import schedule
from pytest_gpuserve.manager.measuring import loads_of
from pytest_gpuserve.manager.prepare import levels_elsewhere
from pytest_gpuserve.markers import arguments, gpus_wanted, throughput_floors
from pytest_gpuserve.matrix.walk import did_you_mean
from pytest_gpuserve.matrix.when import FIXED_FACTS, PREFIXES
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.predicate import Predicate
from pytest_gpuserve.plugin.work import cell_of, stage_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell

__all__ = ["BUILT_IN", "Collection"]

BUILT_IN = "gpuserve"
THROUGHPUT = "test_throughput"


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
    """Hooks of the process that collects: each xdist worker, or the one process without xdist."""

    def __init__(self, config: pytest.Config, plan: Plan) -> None:
        self.plan = plan
        self._ids = [cell.id for cell in plan.cells]
        self._rank = {cell_id: rank for rank, cell_id in enumerate(self._ids)}
        self._suite = _suite_of(plan)
        self._elsewhere: dict[str, set[str]] | None = None
        self.measured = [] if plan.settings.preflight else [cell for cell in plan.cells if loads_of(plan, cell)]
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
        """The session finds the suite before all else."""
        report = yield
        if isinstance(collector, pytest.Session) and self._asked:
            path = Path(importlib.import_module(self._suite).__file__ or "")
            node = _BuiltIn.from_parent(
                collector, path=path, name=self._suite, nodeid=f"{BUILT_IN}/{self._suite.rpartition('.')[2]}.py"
            )
            report.result = [node, *report.result]
        return report

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that uses a fixture of ours, through whatever other fixtures, runs once a cell."""
        if throughput_floors(metafunc.definition, "") and "load" not in metafunc.fixturenames:
            pytest.fail(
                "@pytest.mark.throughput_floor is about the fixture `load`, which this test does not use", pytrace=False
            )
        # A wrong mark is told here, as this test's own error: what is raised later ends pytest itself.
        gpus_wanted(metafunc.definition.iter_markers("gpus"), 1)
        if "gpu_cell" in metafunc.fixturenames:
            cells = self._cells_for(metafunc.definition)
            ids = self._ids if len(cells) == len(self._ids) else [cell.id for cell in cells]
            metafunc.parametrize("gpu_cell", cells, ids=ids, indirect=True, scope="function")

    def _cells_for(self, definition: pytest.Item) -> Sequence[Cell]:
        if definition.nodeid == f"{BUILT_IN}/suite.py::{THROUGHPUT}":
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
            predicates.append(self._known(Predicate.of(wanted)))
        return [
            cell
            for cell, facts in ((cell, facts_of(cell)) for cell in self.plan.cells)
            if all(predicate.matches(facts) for predicate in predicates)
        ]

    def _is_fact(self, name: str) -> bool:
        return _is_no_axis(name) or name in self.plan.axes or name in self._levels_elsewhere()

    def _levels_elsewhere(self) -> dict[str, set[str]]:
        if self._elsewhere is None:
            self._elsewhere = levels_elsewhere(self.plan.settings.rootdir)
        return self._elsewhere

    def _known(self, predicate: Predicate) -> Predicate:
        """The predicate, unless it names a level that no matrix has: its test would never run, silently."""
        for term in predicate.terms:
            levels = {level for matrix in self.plan.matrices.values() for level in matrix.axes.get(term.name, ())}
            if _is_no_axis(term.name) or term.values <= levels:
                continue
            levels |= self._levels_elsewhere().get(term.name, set())
            for value in sorted(term.values - levels):
                pytest.fail(
                    f"@pytest.mark.gpu_cells: no matrix has a level {value!r} of {term.name}"
                    f"{did_you_mean(value, sorted(levels))}",
                    pytrace=False,
                )
        return predicate

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """What is not ours or has no cell is deselected; the rest is ordered by cell."""
        mine: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            (mine if cell_of(item) is not None and self._is_asked(item) else others).append(item)
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = schedule.arrange(mine, self._place)

    def _is_asked(self, item: pytest.Item) -> bool:
        if self._asked == [BUILT_IN] or not item.nodeid.startswith(f"{BUILT_IN}/"):
            return True
        return any(_selects(asked, item.nodeid) for asked in self._asked)

    def _place(self, item: pytest.Item) -> schedule.Place:
        cell = cell_of(item)
        assert cell is not None
        stage, order = stage_of(item)
        return schedule.Place(self._rank[cell.id], stage, order)


def _selects(asked: str, nodeid: str) -> bool:
    """True if the command line's `asked` is `nodeid`, a part of it, or the same test for all cells."""
    return nodeid == asked or nodeid.startswith((f"{asked}::", f"{asked}[", f"{asked}/"))
