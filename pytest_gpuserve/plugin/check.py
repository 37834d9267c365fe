"""One check from its first hook to its last: what each phase of the test did to its outcome, and to pytest's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpuserve import verdict
from pytest_gpuserve.errors import MachineError
from pytest_gpuserve.failing import ServerFailed
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.outcome import Outcome, worst
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.model.record import CheckRecord
from pytest_gpuserve.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from pytest_gpuserve.manager import Gate
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.plugin.work import Work

__all__ = ["Check"]

_NOT_RUN = Verdict(Outcome.NOT_RUN)


@dataclass(slots=True)
class Check:
    """`last`: no later check of this session runs in the same cell."""

    work: Work
    nodeid: str
    location: tuple[str, int | None, str]
    last: bool
    gate: Gate
    entries: Sequence[KnownBad]
    verdict: Verdict = _NOT_RUN
    failure: Failure | None = None
    seconds: float = 0.0
    properties: list[tuple[str, object]] = field(default_factory=list)

    def hear(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """One phase of the test has ended: take its outcome, and make pytest's report say it."""
        self.seconds += call.duration
        error = call.excinfo.value if call.excinfo is not None else None
        found = self._verdict_of(report, error)
        if found is None:
            return
        if worst((found.outcome, self.verdict.outcome)) is found.outcome:
            self.verdict = found
        if found.outcome is not Outcome.PASSED:
            self.show(report, found)

    def _verdict_of(self, report: pytest.TestReport, error: BaseException | None) -> Verdict | None:
        if isinstance(error, ServerFailed):
            return self._failed(error.failure)
        if not self.gate.opened and report.when == "setup":
            assert self.gate.outcome is not None
            return Verdict(self.gate.outcome, self.gate.reason)
        if hasattr(report, "wasxfail"):
            # The test's own xfail mark decided: it is about the test, not about the server.
            return Verdict(Outcome.XFAILED if report.skipped else Outcome.XPASSED, str(report.wasxfail))
        if report.skipped:
            return Verdict(Outcome.SKIPPED, _reason_of(report))
        if report.failed:
            if isinstance(error, MachineError):
                # A full disk, say, under what the check wanted to write.
                return self._failed(Failure.of(Kind.INFRA, Phase.SERVING, str(error)))
            return self._failed(_assertion(report, error))
        return Verdict(Outcome.PASSED) if report.when == "call" else None

    def _failed(self, failure: Failure) -> Verdict:
        found = verdict.of_failure(failure, self.entries)
        if self.failure is None or worst((found.outcome, self.verdict.outcome)) is found.outcome:
            self.failure = failure
        return found

    def fixed(self, found: Verdict, report: pytest.TestReport) -> None:
        """Every check of the cell passed although an entry says otherwise: this, the last one, reports it."""
        self.verdict = found
        self.show(report, found)

    def show(self, report: pytest.TestReport, found: Verdict) -> None:
        """Make pytest's report say the verdict, whatever an xfail mark made of it."""
        outcome = found.outcome
        report.gpuserve_outcome = str(outcome)  # type: ignore[attr-defined]
        if outcome is Outcome.XFAILED:
            report.outcome = "skipped"
            report.wasxfail = found.reason
        elif outcome is Outcome.XPASSED:
            self._show_xpassed(report, found)
        elif outcome in (Outcome.SKIPPED, Outcome.BLOCKED, Outcome.NOT_RUN):
            report.outcome = "skipped"
            if not self.gate.opened:
                file, line, _ = self.location
                word = "" if outcome is Outcome.SKIPPED else f"{outcome}: "
                report.longrepr = (file, (line or 0) + 1, f"Skipped: {word}{found.reason}")
        else:
            report.outcome = "failed"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
            _label(report, found)

    def _show_xpassed(self, report: pytest.TestReport, found: Verdict) -> None:
        if found.entry is None or not found.entry.confirmed:
            return
        if found.entry.strict:
            report.outcome = "failed"
            report.longrepr = f"[XPASS(strict)] {found.reason}"
        else:
            report.outcome = "passed"
            report.wasxfail = found.reason

    def record(self) -> CheckRecord:
        """What is kept of the check."""
        outcome = self.verdict.outcome
        return CheckRecord(
            name=self.work.name,
            cell=self.work.cell.id,
            outcome=outcome,
            duration=self.seconds,
            failure=self.failure,
            nodeid=self.nodeid,
            reason=self.verdict.reason if outcome is not Outcome.PASSED else "",
        )

    def user_properties(self) -> list[tuple[str, object]]:
        """Short texts for JUnit's properties; its own message is cut to one by a whole traceback (pytest-xdist#130)."""
        found: list[tuple[str, object]] = [
            ("gpuserve.cell", self.work.cell.id),
            ("gpuserve.outcome", str(self.verdict.outcome)),
        ]
        if self.failure is not None:
            found.append(("gpuserve.failure", f"{self.failure.kind} in {self.failure.phase}"))
            found.append(("gpuserve.signature", self.failure.signature))
        if self.verdict.entry is not None:
            found.append(("gpuserve.known_bad", self.verdict.entry.id))
        return found


def _label(report: pytest.TestReport, found: Verdict) -> None:
    """Put the outcome's word into the report's text and into the line of the short summary."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        message = crash.message.removeprefix("ServerFailed: ")
        said = found.outcome is Outcome.FAILED or message.startswith(f"{found.outcome} ")
        crash.message = message if said else f"{found.outcome}: {message}"
    if found.entry is not None:
        report.sections.append((f"gpuserve: {found.outcome}", found.reason))


def _reason_of(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr or "")
    return text.removeprefix("Skipped: ")


def _assertion(report: pytest.TestReport, error: BaseException | None) -> Failure:
    """A test's own failure against a server that is well."""
    text = f"{type(error).__name__}: {error}" if error is not None else str(report.longrepr)
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    where = "" if report.when == "call" else f" ({report.when})"
    return Failure.of(Kind.ASSERTION, Phase.SERVING, line + where, line=line, text=text)
