"""Outcomes of checks and cells, from failures and known-bad entries (pure; the words are in `model.outcome`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.knownbad import Mode
from pytest_gpuserve.model.outcome import RED, Outcome, worst
from pytest_gpuserve.model.phase import STARTUP, Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_gpuserve.model.failure import Failure
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.model.record import CellRecord

__all__ = [
    "PREFLIGHT_SHOWS",
    "SHOWS",
    "Verdict",
    "blocks",
    "cell_outcome",
    "needs_control",
    "of_failure",
    "of_passing",
    "shown_by",
    "skipped_by",
]

# What each built-in check can show. An entry is only called fixed once all that could have shown its failure ran.
SHOWS: dict[str, frozenset[Kind]] = {
    "ready": frozenset({Kind.REJECTED, Kind.CRASH, Kind.OOM, Kind.HANG}),
    "backend": frozenset({Kind.FALLBACK}),
    "answers": frozenset({Kind.CRASH, Kind.OOM, Kind.HANG, Kind.WRONG_OUTPUT}),
    "output": frozenset({Kind.CRASH, Kind.OOM, Kind.HANG, Kind.WRONG_OUTPUT}),
    "concurrency": frozenset({Kind.CRASH, Kind.OOM, Kind.HANG, Kind.WRONG_OUTPUT}),
    "long-context": frozenset({Kind.CRASH, Kind.OOM, Kind.HANG, Kind.WRONG_OUTPUT}),
    # Where a floor judges it: see `shown_by`.
    "throughput": frozenset({Kind.SLOW}),
}
# Nothing is launched: only what SGLang's own arguments refuse can be seen.
PREFLIGHT_SHOWS: dict[str, frozenset[Kind]] = {"preflight": frozenset({Kind.REJECTED})}
_STARTED = frozenset({*STARTUP, Phase.READY})
# With one of these the baseline serves nobody; a slow or leaking one still says what the flags do.
_NOT_SERVING = frozenset({Kind.REJECTED, Kind.CRASH, Kind.OOM, Kind.HANG, Kind.WRONG_OUTPUT, Kind.FALLBACK, Kind.INFRA})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's outcome, the entry that decided it, and the sentence a person reads."""

    outcome: Outcome
    reason: str = ""
    entry: KnownBad | None = None


def _cite(entry: KnownBad) -> str:
    return " ".join(part for part in (entry.id, entry.issue, entry.reason and f"({entry.reason})") if part)


def skipped_by(entries: Sequence[KnownBad]) -> KnownBad | None:
    """The entry that forbids to launch the cell at all, the most specific first."""
    return next((entry for entry in entries if entry.mode is Mode.SKIP), None)


def of_failure(failure: Failure, entries: Sequence[KnownBad]) -> Verdict:
    """What a failing check is, with the entries that match its cell, most specific first.

    `xfailed` if an entry explains it; `changed` if entries match the cell and none explains it; else `failed`.
    `infra` and `leak` are what they are, whatever an entry says.
    """
    if failure.kind is Kind.INFRA:
        return Verdict(Outcome.INFRA, failure.message)
    if failure.kind is Kind.LEAK:
        return Verdict(Outcome.FAILED, failure.message)
    expected = [entry for entry in entries if entry.mode is Mode.XFAIL]
    for entry in expected:
        if entry.expect.explains(failure):
            return Verdict(Outcome.XFAILED, f"{_cite(entry)}: {failure.kind} in {failure.phase}, as expected", entry)
    for entry in expected:
        return Verdict(Outcome.CHANGED, _changed(failure, entry), entry)
    return Verdict(Outcome.FAILED, failure.message)


def _changed(failure: Failure, entry: KnownBad) -> str:
    """What was expected and what was seen, the news first: a table cuts it. The entry's own words come last."""
    expect = entry.expect
    phases = "/".join(map(str, expect.phases)) or "any phase"
    expected = f"expected {expect.kind} in {phases}"
    if failure.kind is expect.kind and (not expect.phases or failure.phase in expect.phases):
        # Then it is the text that differs.
        expected += f" with {expect.match!r}" if expect.match is not None else f" matching {expect.match_re!r}"
    text = f"{expected} ({entry.id}), was {failure.kind} in {failure.phase}: {failure.message}"
    return f"{text}\n{_cite(entry)}" if entry.issue or entry.reason else text


def shown_by(*, preflight: bool, judged: bool) -> Mapping[str, frozenset[Kind]]:
    """What each check of a cell can show in this run.

    `judged`: floors ask something of the cell. Throughput that is only measured (to record floors, or since another
    cell is compared with it) passes however slow it is.
    """
    if preflight:
        return PREFLIGHT_SHOWS
    return SHOWS if judged else {name: kinds - {Kind.SLOW} for name, kinds in SHOWS.items()}


def _needed(entry: KnownBad, shows: Mapping[str, frozenset[Kind]]) -> frozenset[str]:
    """The checks that could have shown what `entry` expects."""
    able = frozenset(name for name, kinds in shows.items() if entry.expect.kind in kinds)
    phases = entry.expect.phases
    if phases and _STARTED.issuperset(phases):
        return able & {"ready"} or able
    return able


def of_passing(
    passed: Collection[str], entries: Sequence[KnownBad], shows: Mapping[str, frozenset[Kind]] = SHOWS
) -> Verdict | None:
    """What a cell's last check is when every check of it passed: `xpassed` by an entry that is proved wrong, or None.

    `passed` are the names of the checks that ran and passed. An entry counts only if every check able to show the
    kind it expects is among them. Confirmed entries first: a reported one that passes is information, not an alarm.
    """
    for entry in sorted(entries, key=lambda entry: not entry.confirmed):
        needed = _needed(entry, shows)
        if entry.mode is Mode.XFAIL and needed and needed <= set(passed):
            where = f" ({entry.where})" if entry.where else ""
            text = f"{_cite(entry)} expects {entry.expect.kind}, and the cell passed: retire the entry{where}"
            return Verdict(Outcome.XPASSED, text, entry)
    return None


def cell_outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of the checks' outcomes.

    Checks that were blocked by what an earlier check of the same cell reported count for nothing: else a launch that
    fails as its entry says would read `blocked`, not `xfailed`.
    """
    all_of_them = list(outcomes)
    others = [outcome for outcome in all_of_them if outcome is not Outcome.BLOCKED]
    ran = [outcome for outcome in others if outcome not in (Outcome.SKIPPED, Outcome.NOT_RUN)]
    if Outcome.BLOCKED in all_of_them and not ran:
        return Outcome.BLOCKED
    return worst(ran or others)


def blocks(baseline: CellRecord) -> bool:
    """True if this baseline's result makes its model's deltas `blocked`.

    A baseline that did not serve says nothing about the flags. One that is xfailed, skipped, merely slow, that failed
    on a sick GPU and served on others, or whose GPUs others used after its end, blocks nothing.
    """
    if baseline.outcome not in RED:
        return False
    if baseline.control and baseline.control.get("outcome") == str(Outcome.PASSED):
        return False
    failure = baseline.failure
    if failure is not None and failure.kind is Kind.INFRA and failure.phase is Phase.STOPPED:
        return False
    return failure is None or failure.kind in _NOT_SERVING


def needs_control(failure: Failure, entries: Sequence[KnownBad]) -> bool:
    """True for a hang, a crash or an oom that no entry explains: is it the flags, or is it the machine?"""
    unexpected = of_failure(failure, entries).outcome in (Outcome.FAILED, Outcome.CHANGED)
    return unexpected and failure.kind in (Kind.HANG, Kind.CRASH, Kind.OOM)
