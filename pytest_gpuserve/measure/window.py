"""From arrivals to metrics: pure. One `Trace` a request, one row of metrics a window.

Names and definitions are `sglang.bench_serving`'s (docs/measurement.md); units and directions are in `matrix.types`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Trace", "metrics_of", "percentile"]


@dataclass(slots=True)
class Trace:
    """One request: when it was sent, and after each arrival the time (s) and the number of tokens received so far.

    `error` is None for a request that gave exactly what was asked. `ended` is None while it runs. `held`: it should
    have been sent earlier, and had to wait for one of the load's streams to end.
    """

    sent: float
    prompt_tokens: int
    warmup: bool = False
    held: bool = False
    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("I"))
    ended: float | None = None
    error: str | None = None

    @property
    def heard(self) -> float:
        """When its latest token arrived, or it was sent."""
        return self.times[-1] if self.times else self.sent

    def arrived(self, moment: float, count: int) -> bool:
        """`count` tokens are here at `moment`; False if it was so before."""
        if count <= (self.tokens[-1] if self.tokens else 0):
            return False
        self.times.append(moment)
        self.tokens.append(count)
        return True

    def received_until(self, moment: float) -> int:
        """Tokens that had arrived at `moment`."""
        index = bisect_right(self.times, moment)
        return self.tokens[index - 1] if index else 0


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` (0 to 1) percentile of at least one value with linear interpolation, as numpy's default."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def metrics_of(traces: Sequence[Trace], begin: float, end: float) -> dict[str, float]:
    """Every metric of the window (begin, end], in its unit.

    Tokens count by when they arrived; latencies are those of the requests that ended in the window. What has no value
    (latencies where no request ended, tpot of one-token answers) is absent. Warm-up requests count for nothing.
    """
    length = end - begin
    counted = [trace for trace in traces if not trace.warmup]
    output = sum(trace.received_until(end) - trace.received_until(begin) for trace in counted)
    prompts = sum(trace.prompt_tokens for trace in counted if begin < trace.sent <= end)
    done = [t for t in counted if t.error is None and t.ended is not None and begin < t.ended <= end and t.times]
    row = {
        "output_throughput": output / length,
        "total_throughput": (output + prompts) / length,
        "request_throughput": len(done) / length,
    }
    row |= _latencies("ttft", [trace.times[0] - trace.sent for trace in done])
    row |= _latencies("e2e_latency", [(trace.ended or 0) - trace.sent for trace in done])
    row |= _latencies("tpot", [_after_first(trace) for trace in done if trace.tokens[-1] > 1])
    row |= _latencies("itl", [gap for trace in done for gap in _gaps(trace)])
    return row


def _after_first(trace: Trace) -> float:
    return ((trace.ended or 0) - trace.times[0]) / (trace.tokens[-1] - 1)


def _gaps(trace: Trace) -> list[float]:
    """Inter-token latencies: tokens that arrived together share the time since the arrival before."""
    gaps: list[float] = []
    for index in range(1, len(trace.times)):
        count = trace.tokens[index] - trace.tokens[index - 1]
        gaps += [(trace.times[index] - trace.times[index - 1]) / count] * count
    return gaps


def _latencies(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        f"mean_{name}_ms": fmean(seconds) * 1e3,
        f"median_{name}_ms": median(seconds) * 1e3,
        f"p99_{name}_ms": percentile(seconds, 0.99) * 1e3,
    }
