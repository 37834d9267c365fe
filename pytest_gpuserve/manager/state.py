"""What came of one cell so far, in the process that runs its checks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve import verdict
from pytest_gpuserve.model.outcome import Outcome, worst
from pytest_gpuserve.model.record import CellRecord, CheckRecord

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.manager.plan import Plan
    from pytest_gpuserve.model.cell import Cell
    from pytest_gpuserve.model.failure import Failure
    from pytest_gpuserve.model.knownbad import KnownBad

_LEFT = (Outcome.BLOCKED, Outcome.SKIPPED, Outcome.NOT_RUN)

__all__ = ["CellState", "Gate", "known_bad_json", "record_of"]


@dataclass(frozen=True, slots=True)
class Gate:
    """What the manager says before a check: go (`outcome` None), or how it ends without being run.

    With a `failure` the check reports that failure; else it is skipped with `outcome` and `reason`.
    """

    outcome: Outcome | None = None
    reason: str = ""
    failure: Failure | None = None

    @property
    def opened(self) -> bool:
        """True if the check may run."""
        return self.outcome is None and self.failure is None


def known_bad_json(entry: KnownBad) -> dict[str, object]:
    """How a record names the entry that decided an outcome."""
    return {
        "id": entry.id,
        "issue": entry.issue,
        "reason": entry.reason,
        "mode": str(entry.mode),
        "strict": entry.strict,
        "confirmed": entry.confirmed,
        "versions": dict(entry.versions),
        "expect": {"kind": str(entry.expect.kind), "phase": [str(phase) for phase in entry.expect.phases]},
        "file": entry.where.file if entry.where else "",
        "line": entry.where.line if entry.where else 0,
    }


def record_of(cell: Cell, plan: Plan) -> CellRecord:
    """A cell's record before anything happened."""
    matrix = plan.matrices.get(cell.matrix)
    return CellRecord(
        id=cell.id,
        arch=cell.arch,
        model=cell.model.name,
        axes=dict(cell.axes),
        matrix=cell.matrix,
        baseline=dict(matrix.baseline) if matrix else {},
        flags=dict(cell.flags),
        env=dict(cell.env),
        notes=list(cell.notes),
    )


@dataclass(slots=True)
class CellState:
    """The record under construction, the checks so far, and what ended the server if something did.

    `failure` is set once the server cannot serve any more. `leak` waits for the teardown of the cell's last check.
    `guest` is the record, and the log, of another cell while its server runs on this one's GPUs.
    """

    cell: Cell
    entries: tuple[KnownBad, ...]
    record: CellRecord
    checks: list[CheckRecord] = field(default_factory=list)
    handle: ServerHandle | None = None
    failure: Failure | None = None
    leak: Failure | None = None
    guest: tuple[CellRecord, Path] | None = None
    began: float | None = None

    def add(self, check: CheckRecord, entry: KnownBad | None = None) -> None:
        """One check is through. Its failure is the record's if it is the worst so far."""
        self.checks.append(check)
        worse = worst((check.outcome, self.record.outcome)) is check.outcome is not self.record.outcome
        if entry is not None and (worse or self.record.known_bad is None):
            self.record.known_bad = known_bad_json(entry)
        if worse and check.outcome is not Outcome.BLOCKED:
            self.record.failure = check.failure
            self.record.reason = check.reason
        self.record.outcome = verdict.cell_outcome(one.outcome for one in self.checks)
        if self.record.failure is None and self.record.outcome in (*_LEFT, Outcome.PASSED):
            # Every reason once: what the first check left out must not hide what the next could not judge.
            self.record.reason = "; ".join(dict.fromkeys(one.reason for one in self.checks if one.outcome in _LEFT))

    @property
    def log_name(self) -> str:
        """The name of the next server's log: none is written over, whatever was started before."""
        starts = self.record.server_starts
        return f"server-{starts + 1}.log" if starts else "server.log"

    def begin(self) -> None:
        """GPUs are asked for: from here on the cell takes its time. Waiting for another cell's result is none of it."""
        if self.began is None:
            self.began = time.monotonic()

    def passed(self) -> set[str]:
        """The names of the checks that ran and passed."""
        return {check.name for check in self.checks if check.outcome is Outcome.PASSED}

    @property
    def clean(self) -> bool:
        """True if no check so far came out other than passed or skipped."""
        return all(check.outcome in (Outcome.PASSED, Outcome.SKIPPED) for check in self.checks)

    def close(self) -> CellRecord:
        """The record as it is written: with what took how long."""
        timings = self.record.timings
        timings["checks"] = {check.name: round(check.duration, 3) for check in self.checks}
        if self.began is not None:
            timings["total"] = round(time.monotonic() - self.began, 3)
        return self.record
