"""How far a sound server's logprobs may be from its baseline's: one table, with the measurement behind each row.

Limits lie between what sound servers showed and what planted errors did (docs/measurement.md has both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.measure.canary import Difference

__all__ = ["TABLE", "Tolerance", "tolerance_of"]

_FP8_KV = ("fp8", "mxfp8")
_UNQUANTIZED = frozenset({"", "none", "unquant"})


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


TABLE: dict[str, Tolerance] = {
    row.name: row
    for row in (
        Tolerance(
            name="16-bit, dense",
            prefill=(0.04, 0.16),
            cached=(0.045, 0.20),
            decode=(0.045, 0.25),
            source="H200, Llama: fa3, flashinfer, torch_native against triton at most 0.028 / 0.10 (prefill), "
            "0.026 / 0.12 (decode). CPU, tiny Llama: fp16, fp32 against bf16 at most 0.021 / 0.09, 0.023 / 0.08 "
            "(cached), 0.020 / 0.08; softmax scale +5 % at least 0.054 / 0.20, 0.057 / 0.18 (cached)",
        ),
        Tolerance(
            name="16-bit, MoE",
            prefill=(0.20, 2.0),
            cached=(0.20, 2.0),
            decode=(0.15, 1.0),
            source="H200, MLA with 32 experts: fa3, flashinfer, flashmla against triton: 0.066 / 0.92 (prefill), "
            "0.038 / 0.43 (decode); rope theta +10 %: 0.86 / 3.4",
        ),
        Tolerance(
            name="fp8 KV cache, dense",
            prefill=(0.04, 0.16),
            cached=(0.30, 1.5),
            decode=(0.30, 1.5),
            source="H200, Llama: triton and flashinfer with fp8_e4m3: 0.119 / 0.58 (decode), prefill as 16-bit; "
            "cached not measured, taken as decode",
        ),
        Tolerance(
            name="fp8 KV cache, MoE",
            prefill=(0.20, 2.0),
            cached=(0.40, 2.5),
            decode=(0.40, 2.0),
            source="not measured: the dense row's, wider by what routing added at 16 bits",
        ),
        Tolerance(
            name="quantized weights or fp4 KV cache",
            prefill=(0.40, 2.5),
            cached=(0.60, 3.0),
            decode=(0.60, 3.0),
            source="not measured: twice the fp8 and MoE rows, since sound kernels also round activations differently",
        ),
    )
}


def tolerance_of(kv: str, *, moe: bool, quantization: str) -> Tolerance:
    """The row for a server: by its resolved KV cache dtype (`auto`: the model's) and its weights' `quantization`."""
    kv = kv.lower()
    if quantization.lower() not in _UNQUANTIZED or "fp4" in kv:
        return TABLE["quantized weights or fp4 KV cache"]
    kind = "MoE" if moe else "dense"
    return TABLE[f"fp8 KV cache, {kind}" if kv.startswith(_FP8_KV) else f"16-bit, {kind}"]
