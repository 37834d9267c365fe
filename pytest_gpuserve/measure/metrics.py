"""Metric names, units, directions and definitions, as `sglang.bench_serving` has them; one table for code and docs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["METRICS", "Metric", "percentile"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `higher` says which direction is better: a floor on a latency is a ceiling, never the reverse."""

    name: str
    unit: str
    higher: bool
    definition: str

    @property
    def direction(self) -> str:
        """`higher` or `lower`: what is better."""
        return "higher" if self.higher else "lower"


def _latency(stem: str, definition: str) -> list[Metric]:
    return [
        Metric(f"{kind}_{stem}_ms", "ms", higher=False, definition=f"{kind} of: {definition}")
        for kind in ("mean", "median", "p99")
    ]


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "output_throughput",
            "tok/s",
            higher=True,
            definition="generated tokens that arrived in the window / its length",
        ),
        Metric(
            "total_throughput",
            "tok/s",
            higher=True,
            definition="generated tokens plus prompt tokens of requests begun / length",
        ),
        Metric("request_throughput", "req/s", higher=True, definition="requests that ended in the window / its length"),
        *_latency("ttft", "time from sending a request to its first token"),
        *_latency("tpot", "(end-to-end latency - ttft) / (output tokens - 1), per request"),
        *_latency("itl", "time between two arrivals of one request, shared by the tokens that arrived together"),
        *_latency("e2e_latency", "time from sending a request to its last byte"),
    )
}


def percentile(values: list[float], share: float) -> float:
    """The `share` (0 to 1) percentile with linear interpolation, as numpy's default; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
