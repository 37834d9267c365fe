"""What the controller keeps of a run: checks and cells as they come in, `events.jsonl`, and the reports at the end."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import schedule, verdict
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.manager.run import Run
from pytest_gpuserve.manager.state import record_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.record import CellRecord
from pytest_gpuserve.plugin.work import name_of
from pytest_gpuserve.report import github, markdown
from pytest_gpuserve.report.command import earlier_runs
from pytest_gpuserve.report.html import Side, page, past_of
from pytest_gpuserve.report.store import (
    Events,
    run_header,
    run_record,
    write_json_atomic,
    write_text_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.compare.patch import Patch
    from pytest_gpuserve.manager.plan import Plan

__all__ = ["Ledger"]


class Ledger:
    """Fed by the controller's hooks. `record` is run.json's content once `finish` was called, `said` what to print,
    `unwritten` whether something of it is in no file. `before` is the record to compare with.
    """

    def __init__(self, plan: Plan, command: Sequence[str], before: dict[str, Any] | None = None) -> None:
        assert plan.folder is not None
        self._before = before
        self._plan = plan
        self._folder = plan.folder
        self._run = Run(plan)
        self._events = Events(plan.folder)
        self._checks: list[dict[str, Any]] = []
        self._cells: dict[str, CellRecord] = {}
        self._planned: dict[str, list[str]] = {}
        self.begun = False
        self.record: dict[str, Any] | None = None
        self.said: list[str] = []
        self.unwritten = False
        self._header = run_header(
            simulated=plan.simulated,
            started=datetime.fromisoformat(plan.started),
            command=command,
            versions=plan.versions,
            taken_for={name: taken.to_json() for name, taken in plan.taken_for.items()},
            driver=plan.driver,
            host=platform.node(),
            gpus=[gpu.to_json() for gpu in plan.gpus],
            matrices=[
                {"name": matrix.name, "path": str(matrix.path), "title": matrix.title}
                for matrix in plan.matrices.values()
            ],
            shard=None if plan.shard is None else plan.shard.to_json(),
        )

    def begin(self, cells: Sequence[str], nodeids: Sequence[str]) -> None:
        """The collection is known: the run's event says what is going to happen."""
        self.begun = True
        self._planned = {cell: [] for cell in cells}
        for nodeid in nodeids:
            cell = schedule.cell_in(nodeid, self._planned)
            if cell is not None:
                self._planned[cell].append(nodeid)
        planned = [record_of(self._plan.by_id[cell], self._plan).to_json() for cell in cells]
        self._events.write("run", **self._header, planned=planned)

    def hear(self, payload: Mapping[str, Any]) -> None:
        """A check is through, and with its last one the cell."""
        self._checks.append(payload["check"])
        self._events.write("check", **payload["check"])
        if "cell" in payload:
            self.cell(CellRecord.from_json(payload["cell"]))

    def cell(self, record: CellRecord) -> None:
        """A cell is through."""
        self._cells[record.id] = record
        self._events.write("cell", **record.to_json())

    def crashed(self, nodeid: str, said: str) -> tuple[Outcome, str]:
        """A worker died in this test: `infra`, unless it said that the test timed out, which is the test's failure.

        Returns the outcome and the message that stand for the test's report.
        """
        cell_id = schedule.cell_in(nodeid, self._plan.by_id)
        words = self._run.last_words(cell_id) if cell_id else ""
        outcome, kind = (Outcome.FAILED, Kind.ASSERTION) if words else (Outcome.INFRA, Kind.INFRA)
        message = f"{words or f'infra: {said}'}; the rest of its cell is not run"
        if cell_id is None:
            return outcome, message
        failure = Failure.of(kind, Phase.SERVING, message)
        check = {
            "name": name_of(nodeid, cell_id),
            "cell": cell_id,
            "outcome": str(outcome),
            "duration": 0.0,
            "failure": failure.to_json(),
            "nodeid": nodeid,
            "reason": message,
        }
        record = self._unfinished(cell_id)
        record.outcome, record.failure, record.reason = outcome, failure, message
        self.hear({"check": check, "cell": record.to_json()})
        # A delta in another worker may be waiting for exactly this cell.
        self._run.keep(record)
        return outcome, message

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, *, complete: bool) -> None:
        """Writes run.json and the reports. What cannot be written is said, and costs no result."""
        cells = [self._result_of(cell_id) for cell_id in self._planned]
        self.record = run_record(self._header, cells=cells, checks=self._all_checks(), complete=complete)
        try:
            write_json_atomic(self._folder / "run.json", self.record)
            self._reports()
            self._floors()
        except (GpuserveError, OSError) as error:
            self.said.append(f"gpuserve: {error}")
            self.unwritten = True
        if self._events.problem:
            self.unwritten = True
            self.said.append(f"gpuserve: {self._events.problem}")
        self._events.write("end", complete=complete)
        self._events.close()

    def _result_of(self, cell_id: str) -> CellRecord:
        if cell_id in self._cells:
            return self._cells[cell_id]
        written = self._run.result_of(cell_id)
        if written is not None:
            # An interrupted worker has no way to tell the controller any more, but it has written this.
            return written
        record = self._unfinished(cell_id)
        outcomes = [Outcome(check["outcome"]) for check in self._checks if check["cell"] == cell_id]
        record.outcome = verdict.cell_outcome(outcomes)
        record.reason = "the run ended in the middle of it" if outcomes else "the run ended before it"
        return record

    def _unfinished(self, cell_id: str) -> CellRecord:
        """The record of a cell whose worker told nothing at its end; a log is the sign that a server was started."""
        record = record_of(self._plan.by_id[cell_id], self._plan)
        folder = self._run.cell(cell_id)
        record.folder = str(folder.relative_to(self._folder))
        record.server_starts = int((folder / "server.log").exists())
        return record

    def _all_checks(self) -> list[dict[str, Any]]:
        """The checks that ran, and those that were not reached."""
        ran = {check["nodeid"] for check in self._checks}
        missing = [
            {
                "name": name_of(nodeid, cell_id),
                "cell": cell_id,
                "outcome": str(Outcome.NOT_RUN),
                "duration": 0.0,
                "failure": None,
                "nodeid": nodeid,
                "reason": "not reached",
            }
            for cell_id, nodeids in self._planned.items()
            for nodeid in nodeids
            if nodeid not in ran
        ]
        return [*self._checks, *missing]

    def _reports(self) -> None:
        assert self.record is not None
        comparison = self._comparison()
        text = markdown.summary(self.record, comparison)
        write_text_atomic(self._folder / "summary.md", text)
        earlier = past_of(earlier_runs(self._folder, self.record))
        write_text_atomic(self._folder / "report.html", page([Side(self.record, self._folder, earlier)]))
        step = os.environ.get("GITHUB_STEP_SUMMARY")
        if step:
            record = self.record
            github.append_step_summary(lambda limit: markdown.summary(record, comparison, limit), Path(step))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            workspace = os.environ.get("GITHUB_WORKSPACE")
            self.said += github.annotations(self.record, Path(workspace) if workspace else None)

    def _floors(self) -> None:
        """`--gpu-floors record`: the floors that the measurements support, as a patch beside the record."""
        if self._plan.settings.floors != "record" or self.record is None:
            return
        from pytest_gpuserve.compare.floors import propose

        proposal = propose(self.record, self._plan.matrices.values(), self._plan.settings.rootdir)
        self.said += [f"floors: {text}" for text in proposal.said]
        if proposal.patch:
            path = self._folder / "floors.patch"
            write_text_atomic(path, proposal.patch)
            self.said.append(f"floors: apply with: git -C {proposal.root} apply {path}")

    def _comparison(self) -> str | None:
        """`--gpu-compare`: what changed since the record before, as `gpuserve compare` tells it, and the patch that
        follows beside the record; never changes the outcome.
        """
        if self._before is None or self.record is None:
            return None
        from pytest_gpuserve.compare import compare, render
        from pytest_gpuserve.compare.lists import patch_of, repository_of

        root = self._plan.settings.rootdir
        comparison = compare(self._before, self.record)
        patch: Patch | None = None
        try:
            patch = patch_of(comparison, self.record, root)
        except GpuserveError as error:
            self.said.append(f"gpuserve: no patch to the known-bad list: {error}")
        self.said += ["", *render.text(comparison, patch).rstrip("\n").splitlines()]
        if patch is not None and patch.text:
            file = self._folder / "known_bad.patch"
            write_text_atomic(file, patch.text)
            self.said.append(f"Apply it with: git -C {repository_of(root)} apply {file}")
        return render.markdown(comparison, patch)
