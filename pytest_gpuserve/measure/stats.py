"""Medians, spreads and verdicts on floors: pure, and nothing cleverer than it needs to be.

Two kinds of noise. Within one start, windows differ by 1.5 to 9 %. Between two starts of the same thing on the same
machine, medians differ by more: 12 % were seen at concurrency 1 on an H200. So a shortfall of less than
`BETWEEN_STARTS` decides nothing on one start: it asks for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

__all__ = ["BETWEEN_STARTS", "Decision", "judge", "mad", "proposed_floor"]

BETWEEN_STARTS = 0.15
STARTS_NEEDED = 3
_SIGMA = 1.4826  # of normal noise, per median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median of n normal samples: this times sigma / sqrt(n)
_CERTAINTY = 2.0  # standard errors a shortfall must exceed


def mad(samples: list[float]) -> float:
    """Median absolute deviation from the median; 0 of one sample."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`verdict`: ok, below-floor or inconclusive. `more_samples`/`more_starts` would decide an inconclusive one."""

    verdict: str
    median: float
    spread: float
    text: str
    more_samples: int = 0
    more_starts: int = 0


def judge(starts: list[list[float]], bound: float, *, higher: bool) -> Decision:
    """Whether what was measured meets `bound`. `starts` has one list of window samples for each server start.

    Meets it (>= where higher is better): ok. Misses it by more than the noise explains: below-floor. Misses it by
    less: inconclusive, with how many more windows, or starts, would decide.
    """
    everything = [sample for start in starts for sample in start]
    medians = [median(start) for start in starts]
    middle, spread = median(medians), mad(everything)
    short = (bound - middle) / bound if higher else (middle - bound) / bound
    if short <= 0:
        return Decision(verdict="ok", median=middle, spread=spread, text=f"{-short:.1%} inside the floor")
    error = _MEDIAN_ERROR * _SIGMA * spread / math.sqrt(len(everything)) / bound
    if short <= _CERTAINTY * error:
        needed = math.ceil((_CERTAINTY * _MEDIAN_ERROR * _SIGMA * spread / bound / short) ** 2)
        more = max(needed - len(everything), 1)
        noise = _SIGMA * spread / bound
        text = f"{short:.1%} short, but the windows vary by {noise:.1%}: {more} more windows would decide"
        return Decision(verdict="inconclusive", median=middle, spread=spread, text=text, more_samples=more)
    if short < BETWEEN_STARTS and len(starts) < STARTS_NEEDED:
        more = STARTS_NEEDED - len(starts)
        text = (
            f"{short:.1%} short on {len(starts)} start(s), and starts of the same thing differ by up to 12 %: "
            f"{more} more starts would decide"
        )
        return Decision(verdict="inconclusive", median=middle, spread=spread, text=text, more_starts=more)
    return Decision(verdict="below-floor", median=middle, spread=spread, text=f"{short:.1%} short, beyond the noise")


def proposed_floor(samples: list[float], *, higher: bool = True) -> float:
    """A floor that measured noise supports: median - max(4 × MAD, 5 %), or plus that where lower is better."""
    margin = max(4 * mad(samples), 0.05 * median(samples))
    return median(samples) - margin if higher else median(samples) + margin
