"""From arrivals to metrics: pure. One `Trace` a request, one row of metrics a window."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import fmean, median

from pytest_gpuserve.measure.metrics import percentile

__all__ = ["Trace", "metrics_of"]


@dataclass(slots=True)
class Trace:
    """One request: when it was sent, and after each arrival the time and the tokens received so far.

    `error` is None for a request that gave exactly the tokens asked for. `ended` is None while it runs.
    """

    sent: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: float | None = None
    error: str | None = None

    def received_until(self, moment: float) -> int:
        """Tokens that had arrived at `moment`."""
        index = bisect_right(self.times, moment)
        return self.tokens[index - 1] if index else 0


def _latencies(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = [value * 1e3 for value in seconds]
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": median(values),
        f"p99_{name}_ms": percentile(values, 0.99),
    }


def _gaps(trace: Trace) -> list[float]:
    """Inter-token latencies: tokens that arrived in one piece share the time since the piece before."""
    gaps: list[float] = []
    for index in range(1, len(trace.times)):
        count = trace.tokens[index] - trace.tokens[index - 1]
        if count > 0:
            gaps.extend([(trace.times[index] - trace.times[index - 1]) / count] * count)
    return gaps


def metrics_of(traces: list[Trace], begin: float, end: float) -> dict[str, float]:
    """Every metric of the window (begin, end], in its unit. Latencies are of the requests that ended in it."""
    length = end - begin
    output = sum(trace.received_until(end) - trace.received_until(begin) for trace in traces)
    prompts = sum(trace.prompt_tokens for trace in traces if begin < trace.sent <= end)
    done = [t for t in traces if t.error is None and t.ended is not None and begin < t.ended <= end and t.times]
    row = {
        "output_throughput": output / length,
        "total_throughput": (output + prompts) / length,
        "request_throughput": len(done) / length,
    }
    row |= _latencies("ttft", [trace.times[0] - trace.sent for trace in done])
    row |= _latencies("e2e_latency", [(trace.ended or 0) - trace.sent for trace in done])
    row |= _latencies("tpot", [(t.times[-1] - t.times[0]) / (t.tokens[-1] - 1) for t in done if t.tokens[-1] > 1])
    row |= _latencies("itl", [gap for trace in done for gap in _gaps(trace)])
    return row
