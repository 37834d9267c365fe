"""The controller's hooks: the plan, the run's folder, events as they happen, the record and the reports at the end."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpuserve import schedule
from pytest_gpuserve.errors import GpuserveError, UsageError
from pytest_gpuserve.manager.prepare import SIMULATED_VERSIONS, prepare, require_locks, settle
from pytest_gpuserve.manager.run import Run
from pytest_gpuserve.model.words import machine, number
from pytest_gpuserve.plugin import active
from pytest_gpuserve.plugin.ledger import Ledger
from pytest_gpuserve.plugin.live_line import LiveLine
from pytest_gpuserve.plugin.planning import plan_lines
from pytest_gpuserve.plugin.runner import REPORT
from pytest_gpuserve.plugin.work import cell_of
from pytest_gpuserve.report.store import new_run_folder, read_run
from pytest_gpuserve.report.terminal import summary

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.settings import Settings

__all__ = ["Controller"]

_WORDS = {"infra": "I", "changed": "C", "blocked": "b", "not-run": "n"}


class Controller:
    """There once a run: in the process that the user started."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._plan: Plan | None = None
        self._ledger: Ledger | None = None
        # None until the collection is known.
        self._selected: tuple[str, ...] | None = None
        self._interrupted = self._broken = False
        self._line: LiveLine | None = None
        self._failed = 0
        if settings.plan:
            # Nothing is run: workers would only collect.
            config.option.tx, config.option.dist, config.option.numprocesses = [], "no", None

    @property
    def _distributed(self) -> bool:
        """True if xdist's workers run the tests. For `--collect-only` xdist starts none."""
        return bool(getattr(self._config.option, "tx", None)) and not self._config.option.collectonly

    @property
    def plan(self) -> Plan:
        """There from the session's start."""
        assert self._plan is not None
        return self._plan

    @property
    def cell_ids(self) -> Mapping[str, Cell]:
        """For the scheduler, which groups tests by the cell's id in their names."""
        return self.plan.by_id

    def for_worker(self) -> bytes:
        """The plan as a worker gets it."""
        return pickle.dumps(self.plan)

    # -- start ---------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Before xdist starts its workers: decide what the run is. All mistakes of the user's end it here."""
        config = self._config
        with active.user_errors():
            plan = prepare(self._settings)
            # Read before this run has a folder: of a report directory the latest run is meant, which is not this one.
            before = _record_before(self._settings.compare, plan) if self._settings.compare else None
            if not (self._settings.plan or config.option.collectonly):
                require_locks(plan)
                started = datetime.fromisoformat(plan.started)
                plan = settle(plan, new_run_folder(self._settings.report, started))
        self._plan = plan
        self._line = LiveLine(config)
        if plan.folder is not None:
            self._ledger = Ledger(plan, [sys.argv[0], *map(str, config.invocation_params.args)], before)
        if not self._distributed:
            runner = active.collect_and_run(config, plan)
            runner.show = self._line.event
            runner.on_lost = self._ledger.cell if self._ledger else None
        elif plan.folder is not None:
            self._line.follow(plan.folder)

    def pytest_report_header(self) -> list[str]:
        """Which matrix, on which machine, with what."""
        plan = self.plan
        names = ", ".join(f"{name} ({matrix.path})" for name, matrix in plan.matrices.items())
        gpus = machine(((gpu.name, gpu.arch) for gpu in plan.gpus), {cell.arch for cell in plan.cells}) or "no GPU"
        told = "SIMULATED " if plan.simulated else ""
        invented = plan.simulated and plan.versions == SIMULATED_VERSIONS
        source = "(SIMULATED)" if invented else f"in {plan.settings.python}"
        lines = [
            f"gpuserve: {told}{number(len(plan.cells), 'cell')} of {names}",
            f"gpuserve: {gpus}; sglang {plan.versions.get('sglang', 'unknown')} {source}",
        ]
        if plan.shard is not None:
            share = f"{number(len(plan.cells), 'cell')} of {len(plan.shard.whole)}"
            lines.append(f"gpuserve: shard {plan.shard.index} of {plan.shard.of}: {share}")
        lines += [f"gpuserve: {remark}" for remark in plan.remarks]
        return lines + ([f"gpuserve: writes to {plan.folder}"] if plan.folder else [])

    # -- what is going to run ------------------------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: the cells that are left after `-k` and the like."""
        if not self._distributed:
            cells = [cell for cell in map(cell_of, session.items) if cell is not None]
            self._begin([cell.id for cell in cells], [item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """With xdist: the same, as the first worker tells it."""
        if self._ledger is not None and not self._ledger.begun:
            self._begin([cell for one in ids if (cell := schedule.cell_in(one, self.plan.by_id))], ids)

    def _begin(self, cells: Sequence[str], nodeids: Sequence[str]) -> None:
        self._selected = tuple(dict.fromkeys(cells))
        if self._ledger is not None:
            self._ledger.begin(self._selected, nodeids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """`--gpu-plan`: nothing is run."""
        if not self._settings.plan or session.testsfailed:
            return None
        return True

    # -- what happened -------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every outcome goes to events.jsonl as it comes in."""
        if self._ledger is None:
            return
        text = getattr(report, REPORT, None)
        if text is not None:
            self._ledger.hear(json.loads(text))
        if report.failed:
            self._failed += 1
            if 0 < (self._config.getvalue("maxfail") or 0) <= self._failed:
                Run(self.plan).stop(f"stopped after {number(self._failed, 'failure')}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """An xdist worker died in a test, and whoever waits for the cell must hear of it."""
        if self._ledger is not None:
            outcome, report.longrepr = self._ledger.crashed(crashitem, str(report.longrepr))
            report.gpuserve_outcome = str(outcome)  # type: ignore[attr-defined]

    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Words and letters for the outcomes that pytest has none for; they count as what pytest takes them for."""
        outcome = _outcome_of(report)
        if outcome is None or report.passed:
            return None
        category = "skipped" if report.skipped else "error" if report.when in ("setup", "teardown") else "failed"
        return category, _WORDS[outcome], (outcome.upper(), {"red": category != "skipped", "yellow": report.skipped})

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        """A second Ctrl-C, while pytest looks at the first, leaves the session without its exit status."""
        self._interrupted = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """An xdist worker's costs the tests it had, and nothing else: xdist itself ends the run with 0 then."""
        self._broken = True

    # Innermost: the workers and the manager have ended, and pytest's terminal summary is still to come.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Write the record and the reports."""
        try:
            yield
        finally:
            if self._line is not None:
                self._line.close()
            if (self._settings.plan and self._selected and not session.testsfailed) or self._idle_shard(session):
                session.exitstatus = pytest.ExitCode.OK
            if self._ledger is not None:
                ended = session.exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
                self._ledger.finish(complete=ended and not self._interrupted and not self._broken)
                if self._broken and session.exitstatus == pytest.ExitCode.OK:
                    session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
                if self._ledger.unwritten and session.exitstatus == pytest.ExitCode.OK:
                    # Whoever reads the record would read an older one, or none.
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _idle_shard(self, session: pytest.Session) -> bool:
        """More machines than models: there is nothing for this one to do, which is no mistake of anybody's."""
        empty = self._plan is not None and self._plan.shard is not None and not self._plan.cells
        return empty and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of cells, or the plan."""
        if self._plan is None or self._selected is None:
            return
        tr = terminalreporter
        if self._plan.shard is not None and not self._plan.cells:
            shard = self._plan.shard
            few = "there are fewer models than shards, and a model is never split"
            tr.write_line(f"gpuserve: shard {shard.index} of {shard.of} has no cell: {few}")
        elif not self._selected:
            if not tr.stats.get("error"):
                tr.write_line(
                    f"gpuserve: no cell is selected, of {len(self.plan.cells)} in the matrix; --gpu-plan without -k "
                    "and without paths shows them",
                    yellow=True,
                )
        elif self._settings.plan:
            tr.write_sep("=", "SIMULATED plan" if self.plan.simulated else "plan")
            for text in plan_lines(self.plan, self._selected):
                tr.write_line(text)
        elif self._ledger is not None and self._ledger.record is not None:
            tr.write_sep("=", self._title())
            for text, markup in summary(self._ledger.record, tr._tw.fullwidth, self.plan.folder):
                tr.write_line(text, **markup)
            for text in self._ledger.said:
                tr.write_line(text)

    def _title(self) -> str:
        if self._settings.preflight:
            return "preflight: accepted by SGLang's arguments, which is never supported"
        return "SIMULATED cells" if self.plan.simulated else "cells"


def _record_before(path: Path, plan: Plan) -> dict[str, Any]:
    """The record to compare with; of a report directory the latest run that is simulated if this one is, or real."""
    try:
        record = read_run(path)
        if not (path / "runs").is_dir() or record["simulated"] is plan.simulated:
            return record
        folders = [one for one in sorted((path / "runs").iterdir(), reverse=True) if not one.is_symlink()]
        for folder in folders:
            with suppress(GpuserveError):
                record = read_run(folder)
                if record["simulated"] is plan.simulated:
                    return record
    except GpuserveError as error:
        raise UsageError(f"--gpu-compare: {error}") from error
    kind = "simulated" if plan.simulated else "real"
    raise UsageError(f"--gpu-compare {path}: none of its {number(len(folders), 'run')} is a {kind} one, as this run is")


def _outcome_of(report: Any) -> str | None:
    """The outcome that a report carries, if pytest has no word for it."""
    found = getattr(report, "gpuserve_outcome", None)
    return found if found in _WORDS else None
