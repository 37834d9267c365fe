"""Verdicts on floors: no flapping under noise, no hiding of what is really slow."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.measure.stats import Reference, judge, mad, median_error, proposed_floor, start_error

STEADY = [100.0, 101.0, 99.0, 100.5, 99.5]


def drawn(
    seed: int, *, level: float, between: float, within: float, starts: int, windows: int = 5
) -> list[list[float]]:
    generator = random.Random(seed)
    levels = [level * (1 + generator.gauss(0, between)) for _ in range(starts)]
    return [[one * (1 + generator.gauss(0, within)) for _ in range(windows)] for one in levels]


def test_a_dip_of_3_percent_under_10_percent_noise_is_inconclusive_and_says_how_many_samples_would_decide() -> None:
    noisy = [97.0, 87.0, 107.0, 90.0, 104.0]  # median 97, MAD 7: a standard deviation of about 10 %
    found = judge([noisy], 100.0, higher=True)
    assert found.verdict == "inconclusive"
    assert f"{found.more_samples} more windows would decide" in found.text
    # With that many of the same kind it is decided by their number alone.
    repeated = noisy * (1 + -(-found.more_samples // len(noisy)))
    assert judge([repeated], 100.0, higher=True).more_samples == 0


@pytest.mark.parametrize(
    ("starts", "bound", "verdict", "more_starts"),
    [
        ([STEADY], 100.0, "ok", 0),
        ([STEADY], 90.0, "ok", 0),
        ([STEADY], 110.0, "inconclusive", 2),
        ([STEADY, STEADY], 110.0, "inconclusive", 1),
        ([STEADY, STEADY, STEADY], 110.0, "below-floor", 0),
        ([STEADY], 120.0, "below-floor", 0),
        ([STEADY], 800.0, "below-floor", 0),
        # Each start is steady, and they differ by more than they miss the floor by: more windows would say nothing.
        ([[80.0] * 5, [100.0] * 5, [112.0] * 5], 104.0, "inconclusive", 189),
        ([[98.0] * 5, [98.0] * 5, [112.0] * 5], 99.0, "inconclusive", 585),  # two that agree by chance
        ([[80.0], [80.0], [80.0]], 100.0, "below-floor", 0),
    ],
    ids=[
        *("met", "far inside", "near", "near twice", "near three times", "far", "8 times", "starts differ"),
        *("two starts agree", "one window each"),
    ],
)
def test_verdicts(starts, bound, verdict, more_starts) -> None:
    found = judge(starts, bound, higher=True)
    assert (found.verdict, found.more_starts) == (verdict, more_starts)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(10, 1000), min_size=1, max_size=7), min_size=1, max_size=4), st.floats(10, 1000))
def test_a_latencys_ceiling_is_a_floors_mirror(starts, bound) -> None:
    floor = judge(starts, bound, higher=True)
    mirrored = [[2 * bound - sample for sample in start] for start in starts]
    ceiling = judge(mirrored, bound, higher=False)
    assert (floor.verdict, floor.more_starts) == (ceiling.verdict, ceiling.more_starts)


@pytest.mark.parametrize(("between", "within"), [(0.03, 0.03), (0.06, 0.05)])
def test_it_does_not_flap(between: float, within: float) -> None:
    """A cell that is as fast as its floor was proposed from is below it in hardly any night, by its own noise."""
    alarms = 0
    for seed in range(1000):
        floor = proposed_floor(drawn(seed, level=100, between=0, within=within, starts=1, windows=15)[0])
        starts = drawn(seed + 10**6, level=100, between=between, within=within, starts=1)
        found = judge(starts, floor, higher=True)
        if found.more_starts:
            starts += drawn(seed + 2 * 10**6, level=100, between=between, within=within, starts=2)
            found = judge(starts, floor, higher=True)
        alarms += found.verdict == "below-floor"
    assert alarms <= 5


@pytest.mark.parametrize("slower", [0.75, 0.5, 1 / 8])
def test_it_does_not_hide_what_is_really_slow(slower: float) -> None:
    missed = 0
    for seed in range(200):
        starts = drawn(seed, level=100 * slower, between=0.03, within=0.03, starts=3)
        found = judge(starts[:1], 92.0, higher=True)
        if found.more_starts:
            found = judge(starts, 92.0, higher=True)
        missed += found.verdict != "below-floor"
    assert missed <= 1


def test_a_reference_that_is_not_known_well_decides_nothing() -> None:
    found = judge([[95.0] * 5] * 3, 100.0, higher=True, reference=baseline(3, error=4.0))
    assert found.verdict == "inconclusive"
    assert "what it is held against is known to 8.0% only (3 starts of m-baseline)" in found.text
    assert judge([[95.0] * 5] * 3, 100.0, higher=True, reference=baseline(3, error=1.0)).verdict == "below-floor"


def baseline(count: int, error: float = 0.0) -> Reference:
    return Reference(error=error, count=count, one="start of m-baseline", many="starts of m-baseline")


def test_a_reference_is_started_as_often_as_what_is_held_against_it() -> None:
    found = judge([[90.0] * 5] * 3, 100.0, higher=True, reference=baseline(1))
    assert (found.verdict, found.more_starts, found.more_references) == ("inconclusive", 0, 2)
    assert "3 starts against 1 start of m-baseline" in found.text
    assert "2 more starts of m-baseline would decide" in found.text
    found = judge([[90.0] * 5], 100.0, higher=True, reference=baseline(1))
    assert (found.more_starts, found.more_references) == (2, 2)
    assert judge([[80.0] * 5], 100.0, higher=True, reference=baseline(1)).verdict == "below-floor"
    # What ran elsewhere counts for nothing, however far apart.
    found = judge([[10.0] * 5], 100.0, higher=True, reference=baseline(0))
    assert (found.verdict, found.more_references) == ("inconclusive", 1)


def test_fewer_windows_than_show_any_noise_decide_nothing() -> None:
    found = judge([[80.0]], 100.0, higher=True)
    assert (found.verdict, found.more_samples) == ("inconclusive", 2)
    assert "20.0% short by 1 window: 2 more windows would decide" in found.text


def test_a_latency_is_above_its_ceiling_and_not_short_of_it() -> None:
    assert judge([[130.0] * 5], 100.0, higher=False).text == "30.0% above, beyond the noise"


def against(seed: int, *, ratio: float, level: float, between: float, within: float) -> str:
    """The verdict on a cell of `level` against a reference of 100, with the further starts that are asked for."""

    def more(of: float, salt: int) -> list[list[float]]:
        return drawn(seed + salt * 10**6, level=of, between=between, within=within, starts=1)

    cell, reference = more(level, 0), more(100, 1)
    while True:
        bound = ratio * median([median(start) for start in reference])
        error = ratio * start_error(reference)
        found = judge(cell, bound, higher=True, reference=baseline(len(reference), error=error))
        again = found.more_references and len(reference) < 4
        if len(cell) > 4 or not (again or found.more_starts):
            return found.verdict
        if again:
            reference += more(100, 10 + len(cell))
        cell += more(level, 20 + len(cell))


@pytest.mark.parametrize(("between", "within"), [(0.03, 0.01), (0.05, 0.02)])
def test_a_ratio_does_not_flap(between: float, within: float) -> None:
    verdicts = [against(seed, ratio=0.95, level=100, between=between, within=within) for seed in range(1000)]
    assert verdicts.count("below-floor") <= 8
    slow = [against(seed, ratio=0.95, level=70, between=between, within=within) for seed in range(200)]
    assert slow.count("below-floor") >= 190


def test_spread_and_proposed_floors() -> None:
    assert mad([1.0]) == 0
    assert median_error([5.0]) == 0
    assert proposed_floor([100.0] * 5) == 95.0  # never closer than 5 %
    assert proposed_floor([100.0, 98.0, 102.0, 96.0, 104.0]) == 92.0  # 4 × MAD of 2
    assert proposed_floor([100.0] * 5, higher=False) == 105.0


@settings(deadline=None)
@given(st.lists(st.floats(1, 1e5), min_size=1, max_size=20))
def test_what_a_floor_was_proposed_from_meets_it(samples) -> None:
    assert judge([samples], max(proposed_floor(samples), 1e-9), higher=True).verdict == "ok"
    assert proposed_floor(samples) < median(samples)
