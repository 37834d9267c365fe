"""What became of one cell: the class of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.speed import compare_speeds, decides, undecided
from pytest_gpuserve.compare.values import FINDINGS, Change, Measure, Row
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.outcome import Outcome
from pytest_gpuserve.model.phase import STARTUP, Phase
from pytest_gpuserve.model.words import number
from pytest_gpuserve.report.describe import blame, one_line, why

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WORKS", "Checks", "judge"]

Cell = dict[str, Any]
# Cell id → check name → outcome, of the checks that failed or passed.
Checks = dict[str, dict[str, str]]

WORKS = frozenset({"passed", "xpassed"})
_FAILS = frozenset({"failed", "changed", "xfailed"})
_TOLD = 3
# Whichever check comes first reports a failure of these, and any start that serves is free of it.
_OF_THE_START = frozenset(map(str, (*STARTUP, Phase.READY)))


def judge(a: Cell | None, b: Cell | None, checks_a: Checks, checks_b: Checks, refusal: str = "") -> Row:
    """The row of one pair; `refusal` says why speeds of these two records are not compared."""
    if a is None and b is not None:
        return _row(Change.NEW, None, b, why(b))
    if b is None and a is not None:
        return _row(Change.GONE, a, None, "this cell is in the first record only", finding=True)
    assert a is not None
    assert b is not None
    lost = _lost(a, b)
    if lost is not None:
        return lost
    if a["outcome"] in WORKS:
        measures = compare_speeds(a, b, refusal)
        if b["outcome"] in _FAILS:
            return _row(Change.BROKE, a, b, "; ".join((why(b), *_few(_fallen(b, measures)))), measures)
        return _speed_row(a, b, measures)
    if b["outcome"] in WORKS:
        unasked = _unasked(a, b, checks_a.get(a["id"], {}), checks_b.get(b["id"], {}))
        if unasked:
            reason = f"no result of what failed before: {unasked} did not run now ({blame(a) or a['outcome']} before)"
            return _row(Change.NOT_RUN, a, b, reason)
        return _row(Change.FIXED, a, b, f"was: {why(a)}", compare_speeds(a, b, refusal))
    difference = _difference(a, b) or _more_fails(checks_a.get(a["id"], {}), checks_b.get(b["id"], {}))
    measures = compare_speeds(a, b, refusal)
    if difference:
        return _row(Change.CHANGED, a, b, f"{difference}; now: {why(b)}", measures)
    return _row(Change.STILL_BAD, a, b, why(b), measures)


def _lost(a: Cell, b: Cell) -> Row | None:
    """NOT-RUN when either side has no result: infra, blocked, skipped and not-run say nothing about the cell."""
    without = [cell for cell in (a, b) if cell["outcome"] not in WORKS | _FAILS]
    if not without:
        return None
    if b in without:
        reason = f"no result: {b['outcome']}{_because(b)}"
        # What never had a result has not lost one.
        return _row(Change.NOT_RUN, a, b, reason, finding=a not in without)
    reason = f"nothing to compare with: {a['outcome']} before{_because(a)}"
    return _row(Change.NOT_RUN, a, b, reason, finding=b["outcome"] in ("failed", "changed"))


def _unasked(a: Cell, b: Cell, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The checks that failed before and did not run now: without them, that the cell passed says nothing."""
    failure = a.get("failure") or {}
    everywhere = failure.get("phase") in _OF_THE_START or failure.get("kind") == Kind.LEAK
    # A record from elsewhere may know no checks.
    if not after or (everywhere and b.get("server_starts")):
        return ""
    return ", ".join(name for name, outcome in before.items() if outcome in _FAILS and after.get(name) not in WORKS)


def _because(cell: Cell) -> str:
    text = why(cell)
    return f" ({text})" if text else ""


def _difference(a: Cell, b: Cell) -> str:
    """In which way two failures differ; empty when they are the same one."""
    before, after = a.get("failure") or {}, b.get("failure") or {}
    for name in ("kind", "phase"):
        if before.get(name) != after.get(name):
            return f"{blame(a) or a['outcome']} before, {blame(b) or b['outcome']} now"
    if before.get("signature") == after.get("signature"):
        return ""
    known_a, known_b = a.get("known_bad") or {}, b.get("known_bad") or {}
    # One entry that explains both is a person's word that it is one bug, whatever the version's wording of it.
    expected = a["outcome"] == b["outcome"] == Outcome.XFAILED
    if expected and known_a.get("id") is not None and known_a.get("id") == known_b.get("id"):
        return ""
    return f"another error: {one_line(str(before.get('signature', '')), 120)}"


def _more_fails(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    more = [name for name, outcome in after.items() if outcome in _FAILS and before.get(name) in WORKS]
    return f"fails more checks: {', '.join(more)}" if more else ""


def _speed_row(a: Cell, b: Cell, measures: tuple[Measure, ...]) -> Row:
    deciding = [measure for measure in measures if decides(measure)]
    for verdict, change in (("slower", Change.SLOWER), ("faster", Change.FASTER)):
        told = [str(measure) for measure in deciding if measure.verdict == verdict]
        if told:
            return _row(change, a, b, "; ".join(_few(told)), measures)
    notes = dict.fromkeys(measure.note for measure in deciding if measure.verdict == "not-comparable")
    reasons = [f"speed not compared: {note}" for note in notes]
    reasons += _few([f"undecided: {measure}" for measure in deciding if undecided(measure)])
    return _row(Change.SAME, a, b, "; ".join(reasons), measures)


def _fallen(b: Cell, measures: tuple[Measure, ...]) -> list[str]:
    """What a `slow` cell did before: its message knows the floor only."""
    if (b.get("failure") or {}).get("kind") != Kind.SLOW:
        return []
    missed = {(row["load"], row["metric"]) for row in b.get("measurements") or () if row["verdict"] == "below-floor"}
    return [str(one) for one in measures if (one.load, one.metric) in missed and one.verdict != "not-comparable"]


def _few(told: list[str]) -> list[str]:
    """One cause moves every metric of a load: the record has them all."""
    rest = len(told) - _TOLD
    return [*told[:_TOLD], f"and {number(rest, 'more metric')}"] if rest > 0 else told


def _row(
    change: Change,
    a: Cell | None,
    b: Cell | None,
    reason: str,
    measures: tuple[Measure, ...] = (),
    *,
    finding: bool | None = None,
) -> Row:
    shown = b if b is not None else a
    assert shown is not None
    return Row(
        change=change,
        id=shown["id"],
        before=_state(a),
        after=_state(b),
        reason=reason,
        measures=measures,
        a=a,
        b=b,
        finding=change in FINDINGS if finding is None else finding,
    )


def _state(cell: Cell | None) -> str:
    if cell is None:
        return "(absent)"
    told = blame(cell)
    if cell["outcome"] == Outcome.INFRA:
        return told or str(Outcome.INFRA)
    return f"{cell['outcome']}: {told}" if told else str(cell["outcome"])
