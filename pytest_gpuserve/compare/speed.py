"""Are two measurements of one thing different? Only beyond their own noise."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.compare.values import Measure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["compare_speeds", "decides", "undecided"]

# Relative differences. Two starts of one server differed by 12 % on an idle H200 (DESIGN section 4).
LEAST = 0.05
ONE_START = 0.15
MADS = 4.0
ENOUGH = 3
# The tail of a handful of requests is one request: shown, but it decides nothing.
_TAIL = re.compile(r"(?:p\d\d+|max|std)_")


def compare_speeds(a: Mapping[str, Any], b: Mapping[str, Any], refusal: str = "") -> tuple[Measure, ...]:
    """Every metric that both cells measured. With `refusal`, the reason, none of them is judged.

    A difference counts beyond the larger of 5 % and four times the larger median absolute deviation; beyond 15 % at
    least where a side has one server start, or too few samples to know its spread.
    """
    before = {_of(item): item for item in a.get("measurements") or ()}
    found = []
    for item in b.get("measurements") or ():
        old = before.get(_of(item))
        if old is not None and old.get("median") is not None and item.get("median") is not None:
            found.append(_measure(old, item, min(_starts(old, a), _starts(item, b)), refusal))
    return tuple(found)


def _of(item: Mapping[str, Any]) -> tuple[str, str, str]:
    """What was measured, and by which of the user's tests: empty for the built-in check."""
    return item["load"], item["metric"], item.get("test", "")


def _starts(item: Mapping[str, Any], cell: Mapping[str, Any]) -> int:
    """How many starts it was measured on; a record that does not say so was of all that the cell had."""
    return len(item.get("starts") or ()) or int(cell.get("server_starts") or 1)


def decides(measure: Measure) -> bool:
    """True if this metric may make a cell SLOWER or FASTER."""
    return _TAIL.match(measure.metric) is None


def undecided(measure: Measure) -> bool:
    """True for a difference that would count, had its threshold not been widened for want of starts or samples."""
    return measure.verdict == "same" and abs(measure.change) > LEAST and measure.threshold == ONE_START


def _measure(old: Mapping[str, Any], new: Mapping[str, Any], starts: int, refusal: str) -> Measure:
    before, after = float(old["median"]), float(new["median"])
    change = (after - before) / before if before > 0 else 0.0
    # Below the least difference that ever counts, the noise need not be known.
    threshold, note = LEAST, ""
    if abs(change) > LEAST:
        threshold, note = _threshold(_samples(old), _samples(new), starts)
    reason = refusal or _not_comparable(old, new)
    if reason:
        verdict, note = "not-comparable", reason
    elif abs(change) <= threshold:
        verdict = "same"
    else:
        verdict = "faster" if (change > 0) == (new.get("direction") != "lower") else "slower"
    return Measure(
        load=f"{new['load']} ({new['test']})" if new.get("test") else new["load"],
        metric=new["metric"],
        unit=new.get("unit") or "",
        before=before,
        after=after,
        change=change,
        threshold=threshold,
        verdict=verdict,
        note=note,
    )


def _threshold(before: Sequence[float], after: Sequence[float], starts: int) -> tuple[float, str]:
    if min(len(before), len(after)) < ENOUGH:
        return ONE_START, f"too few samples ({len(before)} and {len(after)}) to know the noise"
    noise = max(MADS * _relative_mad(before), MADS * _relative_mad(after), LEAST)
    if starts > 1 or noise >= ONE_START:
        return noise, ""
    return ONE_START, "one start, and two starts of the same thing differ by up to 12 %"


def _relative_mad(samples: Sequence[float]) -> float:
    centre = median(samples)
    return median(abs(sample - centre) for sample in samples) / abs(centre) if centre else 0.0


def _samples(item: Mapping[str, Any]) -> list[float]:
    return [float(sample) for sample in item.get("samples") or () if sample is not None]


def _not_comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old.get("unit") != new.get("unit"):
        return f"measured in other units ({old.get('unit')})"
    # A "regression" of 2 to 7 times was a changed sampling setting (newton#3992).
    if (old.get("method") or "") != (new.get("method") or ""):
        return "measured in another way"
    for side, item in (("before", old), ("after", new)):
        if item.get("verdict") == "invalid":
            return f"invalid {side}: {item.get('note') or 'the measurement was disturbed'}"
    return "" if float(old["median"]) > 0 else "nothing was measured before"
