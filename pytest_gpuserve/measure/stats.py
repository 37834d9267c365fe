"""Medians, spreads and verdicts on floors: pure, and nothing cleverer than it needs to be.

Two kinds of noise. Within one start, windows differ by 1.5 to 9 %. Between two starts of the same thing on the same
machine, medians differ by more: 12 % were seen at concurrency 1 on an H200. So a shortfall of less than
`BETWEEN_STARTS` decides nothing on one start: it asks for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pytest_gpuserve.model.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BETWEEN_STARTS", "STARTS_NEEDED", "Decision", "judge", "mad", "median_error", "proposed_floor"]

BETWEEN_STARTS = 0.15
STARTS_NEEDED = 3
_SIGMA = 1.4826  # of normal noise, per median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median of n normal samples: this times sigma / sqrt(n)
_CERTAINTY = 2.0  # standard errors a shortfall must exceed


def mad(samples: Sequence[float]) -> float:
    """Median absolute deviation from the median; 0 of one sample."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the samples' median, in their unit; 0 of one sample, which says nothing of its error."""
    return _MEDIAN_ERROR * _SIGMA * mad(samples) / math.sqrt(len(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`verdict`: ok, below-floor or inconclusive. `more_samples` and `more_starts` would decide an inconclusive one."""

    verdict: str
    median: float
    spread: float
    text: str
    more_samples: int = 0
    more_starts: int = 0


def judge(starts: Sequence[Sequence[float]], bound: float, *, higher: bool, bound_error: float = 0.0) -> Decision:
    """Whether what was measured meets `bound`. `starts` has one list of window samples for each server start.

    Meets it (>= where higher is better): ok. Misses it by more than the noise explains: below-floor. Misses it by
    less: inconclusive, with how many more windows, or starts, would decide. `bound_error` is the standard error of a
    bound that was itself measured (a reference cell's, times the ratio).
    """
    everything = [sample for start in starts for sample in start]
    medians = [median(start) for start in starts]
    middle, spread = median(medians), mad(everything)
    short = (bound - middle) / bound if higher else (middle - bound) / bound
    if short <= 0:
        return Decision(verdict="ok", median=middle, spread=spread, text=f"{-short:.1%} inside the floor")
    # Windows of one start say nothing of the next: with several starts their medians are samples of their own.
    own = max(median_error(everything), median_error(medians))
    error = math.hypot(own, bound_error) / bound
    if short <= _CERTAINTY * error:
        more, text = _undecided(everything, short, bound, own, bound_error)
        return Decision(verdict="inconclusive", median=middle, spread=spread, text=text, more_samples=more)
    if short < BETWEEN_STARTS and len(starts) < STARTS_NEEDED:
        more = STARTS_NEEDED - len(starts)
        text = (
            f"{short:.1%} short on {number(len(starts), 'start')}, and starts of the same thing differ by up to 12 %: "
            f"{number(more, 'more start')} would decide"
        )
        return Decision(verdict="inconclusive", median=middle, spread=spread, text=text, more_starts=more)
    return Decision(verdict="below-floor", median=middle, spread=spread, text=f"{short:.1%} short, beyond the noise")


def _undecided(
    everything: Sequence[float], short: float, bound: float, own: float, bound_error: float
) -> tuple[int, str]:
    """How many more windows would decide, and the sentence that says so; 0 where only a better reference would."""
    allowed = (short * bound / _CERTAINTY) ** 2 - bound_error**2
    noise = _SIGMA * mad(everything) / bound
    if allowed <= 0:
        text = f"{short:.1%} short, and the reference itself is known to {_CERTAINTY * bound_error / bound:.1%} only"
        return 0, text
    # The error falls with the square root of their number.
    more = max(math.ceil(len(everything) * own**2 / allowed) - len(everything), 1)
    return more, f"{short:.1%} short, but the windows vary by {noise:.1%}: {number(more, 'more window')} would decide"


def proposed_floor(samples: Sequence[float], *, higher: bool = True) -> float:
    """A floor that measured noise supports: median - max(4 × MAD, 5 %), or plus that where lower is better."""
    middle = median(samples)
    margin = max(4 * mad(samples), 0.05 * middle)
    return middle - margin if higher else middle + margin
