"""Medians, spreads and verdicts on floors: pure, and nothing cleverer than it needs to be.

Two kinds of noise. Within one start, windows differ by 1.5 to 9 %. Between two starts of the same thing on the same
machine, medians differ by more: 12 % were seen at concurrency 1 on an H200. So a shortfall of less than
`BETWEEN_STARTS` decides nothing on one start, of the cell or of what it is compared with: it asks for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BETWEEN_STARTS",
    "STARTS_NEEDED",
    "Decision",
    "Reference",
    "judge",
    "mad",
    "median_error",
    "proposed_floor",
    "start_error",
]

BETWEEN_STARTS = 0.15
STARTS_NEEDED = 3
_SIGMA = 1.4826  # of normal noise, per median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median of n normal samples: this times sigma / sqrt(n)
_FEW = 5  # with fewer samples, two that happen to agree would make their MAD, and so the doubt, zero
_CERTAINTY = 2.0  # standard errors a shortfall must exceed
_LEAST = 3  # samples without which noise cannot be told from a shortfall at all


def mad(samples: Sequence[float]) -> float:
    """Median absolute deviation from the median; 0 of one sample."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the samples' median, in their unit: from their MAD, or half the range of fewer than five.

    0 of one sample, which says nothing of its error.
    """
    if len(samples) < _FEW:
        return (max(samples) - min(samples)) / 2
    return _MEDIAN_ERROR * _SIGMA * mad(samples) / math.sqrt(len(samples))


def start_error(starts: Sequence[Sequence[float]]) -> float:
    """Standard error of the median of the starts' medians: windows of one start say nothing of the next."""
    everything = [sample for start in starts for sample in start]
    return max(median_error(everything), median_error([median(start) for start in starts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a bound was measured from. `error` is the bound's standard error, in its unit.

    `count` is how often that was measured independently, `one` and `many` the words for it ("start of m-baseline").
    """

    error: float
    count: int
    one: str
    many: str

    def times(self, count: int, more: str = "") -> str:
        """`2 starts of m-baseline`, `1 more start of m-baseline`."""
        return number(count, f"{more}{self.one}", f"{more}{self.many}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`verdict`: ok, below-floor or inconclusive. The `more_…` that are not 0 would decide an inconclusive one.

    `more_samples` are windows, `more_starts` starts of what is judged, `more_references` of what it is compared with.
    """

    verdict: str
    median: float
    spread: float
    text: str
    more_samples: int = 0
    more_starts: int = 0
    more_references: int = 0


def judge(
    starts: Sequence[Sequence[float]], bound: float, *, higher: bool, reference: Reference | None = None
) -> Decision:
    """Whether what was measured meets `bound`. `starts` has one list of window samples for each server start.

    Meets it (>= where higher is better): ok. Misses it by more than the noise explains: below-floor. Misses it by
    less: inconclusive, with how much more of what would decide. `reference` is what the bound was measured from.
    """
    everything = [sample for start in starts for sample in start]
    middle = median([median(start) for start in starts])
    miss = (bound - middle) / bound if higher else (middle - bound) / bound

    def decision(verdict: str, text: str, **more: int) -> Decision:
        return Decision(verdict=verdict, median=middle, spread=mad(everything), text=text, **more)

    if miss <= 0:
        return decision("ok", f"{-miss:.1%} inside the floor")
    short = f"{miss:.1%} {'short' if higher else 'above'}"
    open_ = _too_noisy(starts, miss * bound, bound, reference) or _too_few(starts, miss, reference)
    if open_ is None:
        return decision("below-floor", f"{short}, beyond the noise")
    why, more = open_
    return decision("inconclusive", f"{short}{why}", **more)


_Open = tuple[str, dict[str, int]]


def _too_few(starts: Sequence[Sequence[float]], miss: float, reference: Reference | None) -> _Open | None:
    """What must be started more often, whatever the noise within the starts; None if nothing."""
    needed = STARTS_NEEDED if miss < BETWEEN_STARTS else 1
    own = max(needed - len(starts), 0)
    others = max(needed - reference.count, 0) if reference is not None else 0
    if not own and not others:
        return None
    seen, wanted = [number(len(starts), "start")], []
    if own:
        wanted.append(number(own, "more start"))
    if reference is not None and others:
        seen.append(reference.times(reference.count))
        wanted.append(reference.times(others, "more "))
    differ = ", and starts of the same thing differ by up to 12 %" if needed > 1 else ""
    text = f" on {' against '.join(seen)}{differ}: {' and '.join(wanted)} would decide"
    return text, {"more_starts": own, "more_references": others}


def _too_noisy(
    starts: Sequence[Sequence[float]], miss: float, bound: float, reference: Reference | None
) -> _Open | None:
    """What would make the noise smaller than half the `miss`; None if it is. Errors fall with the root of a number."""
    everything = [sample for start in starts for sample in start]
    if len(everything) < _LEAST:
        more = _LEAST - len(everything)
        text = f" by {number(len(everything), 'window')}: {number(more, 'more window')} would decide"
        return text, {"more_samples": more}
    medians = [median(start) for start in starts]
    own, theirs = start_error(starts), reference.error if reference is not None else 0.0
    if miss > _CERTAINTY * math.hypot(own, theirs):
        return None
    allowed = (miss / _CERTAINTY) ** 2 - theirs**2
    if reference is not None and allowed <= 0:
        known = f"{_CERTAINTY * theirs / bound:.1%}"
        text = f", and what it is held against is known to {known} only ({reference.times(reference.count)})"
        return text, {"more_references": max(STARTS_NEEDED - reference.count, 0)}
    among, word, key = everything, "window", "more_samples"
    if median_error(medians) > median_error(everything):
        among, word, key = medians, "start", "more_starts"
    more = max(math.ceil(len(among) * own**2 / allowed) - len(among), 1)
    noise = f"{_CERTAINTY * own / bound:.1%}"
    return f", but its {word}s vary: it is known to {noise} only, {number(more, f'more {word}')} would decide", {
        key: more
    }


def proposed_floor(samples: Sequence[float], *, higher: bool = True) -> float:
    """A floor that measured noise supports: median - max(4 × MAD, 5 %), or plus that where lower is better."""
    middle = median(samples)
    margin = max(4 * mad(samples), 0.05 * middle)
    return middle - margin if higher else middle + margin
