"""Windows: tokens by when they arrived, latencies of what ended, nothing of the warm-up."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.measure.window import Trace, metrics_of, percentile


def trace(sent: float, times: list[float], ended: float | None, **more: object) -> Trace:
    counts = array("I", range(1, len(times) + 1))
    return Trace(sent=sent, prompt_tokens=10, times=array("d", times), tokens=counts, ended=ended, **more)


def test_every_metric_of_two_requests_by_hand() -> None:
    slow = trace(0.0, [1.0, 2.0, 3.0, 4.0], 4.5)
    fast = trace(2.0, [2.5, 3.0], 3.0)
    row = metrics_of([slow, fast], 1.5, 5.0)
    assert row["output_throughput"] == pytest.approx(5 / 3.5)  # the token at 1.0 was before
    assert row["total_throughput"] == pytest.approx((5 + 10) / 3.5)  # one prompt was sent inside
    assert row["request_throughput"] == pytest.approx(2 / 3.5)
    assert row["mean_ttft_ms"] == pytest.approx(750)
    assert row["median_e2e_latency_ms"] == pytest.approx(2750)
    assert row["mean_tpot_ms"] == pytest.approx(((4.5 - 1.0) / 3 + 0.5 / 1) / 2 * 1000)
    assert row["median_itl_ms"] == pytest.approx(1000)
    assert row["p99_itl_ms"] == pytest.approx(1000)


def test_tokens_that_arrive_together_share_the_time_since_the_arrival_before() -> None:
    bunched = Trace(0.0, 1, times=array("d", [1.0, 2.0]), tokens=array("I", [1, 5]), ended=2.0)
    assert metrics_of([bunched], 0.0, 3.0)["mean_itl_ms"] == pytest.approx(250)


def test_warm_up_requests_count_for_nothing() -> None:
    good = [trace(1.0, [2.0, 3.0], 3.0)]
    warm = [trace(0.5, [1.0, 2.5], 2.5, warmup=True), trace(1.0, [1.5], None, warmup=True)]
    assert metrics_of(good + warm, 0.0, 4.0) == metrics_of(good, 0.0, 4.0)


def test_a_failed_request_has_no_latency_and_is_no_request_that_was_served() -> None:
    good, failed = trace(1.0, [2.0, 3.0], 3.0), trace(1.0, [1.1], 2.0, error="HTTP 500")
    row = metrics_of([good, failed], 0.0, 4.0)
    assert row["request_throughput"] == 0.25
    assert row["mean_ttft_ms"] == 1000


def test_a_window_in_which_nothing_ends_has_no_latencies() -> None:
    row = metrics_of([trace(0.0, [1.0], None)], 0.0, 2.0)
    assert set(row) == {"output_throughput", "total_throughput", "request_throughput"}


times = st.lists(st.floats(0, 100), min_size=1, max_size=20).map(sorted)


@settings(deadline=None)
@given(st.lists(times, max_size=10), st.lists(st.integers(0, 100), min_size=2, max_size=6, unique=True).map(sorted))
def test_neighbouring_windows_count_every_token_once(arrivals, edges) -> None:
    traces = [trace(0.0, one, None) for one in arrivals]
    parts = sum(metrics_of(traces, a, b)["output_throughput"] * (b - a) for a, b in pairwise(edges))
    inside = sum(edges[0] < moment <= edges[-1] for one in arrivals for moment in one)
    assert parts == pytest.approx(inside)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_among_the_values(values, share) -> None:
    found = percentile(values, share)
    assert min(values) <= found <= max(values)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)


def test_percentiles_are_numpys() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile(list(range(101)), 0.99) == 99
    assert percentile([10, 20], 0.99) == pytest.approx(19.9)
