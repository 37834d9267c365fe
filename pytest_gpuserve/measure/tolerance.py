"""How far a sound server's logprobs may be from its baseline's: one table, with the measurement behind each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.measure.canary import Difference

__all__ = ["TABLE", "Tolerance", "tolerance_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest (mean, p99) of |Δ logprob| in nats, by part. `source` is the measurement that supports the row."""

    name: str
    prefill: tuple[float, float]
    cached: tuple[float, float]
    decode: tuple[float, float]
    source: str

    def of(self, part: str) -> tuple[float, float]:
        """The limits of one part."""
        limits: tuple[float, float] = getattr(self, part)
        return limits

    def exceeded(self, difference: Difference) -> bool:
        """True if the mean or the 99th percentile is beyond the limit."""
        mean, p99 = self.of(difference.part)
        return difference.mean > mean or difference.p99 > p99


_DENSE = Tolerance(
    name="16-bit, dense",
    prefill=(0.08, 0.4),
    cached=(0.08, 0.4),
    decode=(0.08, 0.4),
    source="",
)
TABLE = (_DENSE,)


def tolerance_of(dtype: str, kv: str, *, moe: bool, quantization: str) -> Tolerance:
    """The row for a model."""
    return _DENSE
