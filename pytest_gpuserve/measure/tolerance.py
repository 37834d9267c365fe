"""How far a sound server's logprobs may be from its baseline's: one table, with the measurement behind each row.

Limits lie between what sound servers showed and what planted errors did (docs/measurement.md has both).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.measure.canary import Difference

__all__ = ["TABLE", "Tolerance", "tolerance_of"]

_FP8_KV = ("fp8", "mxfp8")
_MLA = frozenset({"mla", "dsa"})
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
            decode=(0.055, 0.25),
            source="H200, Llama, against triton: fa3, flashinfer, torch_native, chunks of 64, float16 at most 0.037 / "
            "0.13 (prefill), 0.042 / 0.14 (cached), 0.046 / 0.15 (decode); one block's scale × 2 at least 0.043 "
            "(prefill), rope theta +1 % 0.070 / 0.36 (prefill)",
        ),
        Tolerance(
            name="16-bit, MLA",
            prefill=(0.034, 0.80),
            cached=(0.038, 1.2),
            decode=(0.055, 1.2),
            source="H200, DeepSeek-V3 with 32 experts, against triton: fa3, flashinfer, flashmla, chunks of 64 at most "
            "0.027 / 0.42 (prefill), 0.032 / 0.67 (cached), 0.038 / 0.57 (decode); rope theta +1 % at least 0.041 "
            "(prefill)",
        ),
        Tolerance(
            name="16-bit, MoE",
            prefill=(0.08, 1.0),
            cached=(0.08, 1.0),
            decode=(0.09, 1.0),
            source="estimate: twice what float16 moved Qwen3-MoE of 2 layers on CPU, 0.031 / 0.17 (prefill), 0.036 / "
            "0.21 (cached), 0.032 / 0.15 (decode), where rope theta +1 % moved 0.050; the minis have 4 layers that "
            "route",
        ),
        Tolerance(
            name="fp8_e4m3 KV cache, dense",
            prefill=(0.04, 0.16),
            cached=(0.43, 1.35),
            decode=(0.40, 1.4),
            source="H200, Llama, against 16 bits: triton at most 0.211 / 0.74 (cached), 0.194 / 0.86 (decode), and not "
            "a bit in prefill; fa3 0.279 / 0.97 (prefill), 0.295 / 0.94 (cached); one stale page at least 0.665 / 1.88 "
            "(cached)",
        ),
        Tolerance(
            name="fp8_e5m2 KV cache, dense",
            prefill=(0.04, 0.16),
            cached=(0.52, 1.65),
            decode=(0.55, 1.8),
            source="H200, Llama, triton against 16 bits: at most 0.401 / 1.31 (cached), 0.411 / 1.39 (decode); one "
            "stale page at least 0.688 / 2.08 (cached)",
        ),
        Tolerance(
            name="fp8 KV cache, MLA",
            prefill=(0.034, 0.80),
            cached=(0.28, 1.2),
            decode=(0.26, 1.5),
            source="H200, DeepSeek-V3 with 32 experts, triton with fp8_e4m3 against 16 bits: at most 0.164 / 0.79 "
            "(cached), 0.178 / 0.91 (decode); one stale page at least 0.484 / 1.48 (cached)",
        ),
        Tolerance(
            name="fp8 KV cache, MoE",
            prefill=(0.08, 1.0),
            cached=(0.50, 2.0),
            decode=(0.50, 2.0),
            source="estimate: the dense row's, wider by what routing adds",
        ),
        Tolerance(
            name="fp8 weights",
            prefill=(0.20, 1.3),
            cached=(0.38, 1.5),
            decode=(0.40, 1.7),
            source="H200, DeepSeek-V3 with 32 experts in fp8, against triton: fa3, flashinfer, deep_gemm, chunks of "
            "64, no radix cache, fp8_e4m3 KV cache at most 0.176 / 0.93 (prefill), 0.260 / 1.17 (cached), 0.261 / 1.07 "
            "(decode); softmax scale +5 % at least 0.221 (prefill), one stale page 0.566 / 1.72 (cached)",
        ),
        Tolerance(
            name="other quantized weights or fp4 KV cache",
            prefill=(0.40, 2.5),
            cached=(0.60, 3.0),
            decode=(0.60, 3.0),
            source="estimate: twice the fp8 row, since kernels differ in whether they round activations too",
        ),
    )
}

# Their prefill attends to the new keys and values before they are rounded into the KV cache: an fp8 one moves not one
# bit of it (measured). Others cast the query too, or read back what they wrote.
_PREFILL_IN_16_BIT = frozenset({"triton", "flashinfer", "torch_native"})


def tolerance_of(kv: str, *, moe: bool, attention: str, quantization: str, backend: str) -> Tolerance:
    """The row for a server: by its resolved KV cache dtype (`auto`: the model's), its weights' `quantization`, its
    kind of `attention` (mla, dsa, …) and the attention `backend` of its prefill.

    With an fp8 KV cache under a backend that computes prefill in fp8 too, prefill has the limits of the cached part.
    """
    kv, quantization = kv.lower(), quantization.lower()
    if "fp4" in kv or (quantization not in _UNQUANTIZED and "fp8" not in quantization):
        return TABLE["other quantized weights or fp4 KV cache"]
    fp8_kv = kv.startswith(_FP8_KV)
    if quantization not in _UNQUANTIZED:
        row = TABLE["fp8 weights"]
    elif attention in _MLA:
        row = TABLE["fp8 KV cache, MLA" if fp8_kv else "16-bit, MLA"]
    elif moe:
        row = TABLE["fp8 KV cache, MoE" if fp8_kv else "16-bit, MoE"]
    elif fp8_kv:
        row = TABLE[f"{'fp8_e5m2' if kv.endswith('e5m2') else 'fp8_e4m3'} KV cache, dense"]
    else:
        row = TABLE["16-bit, dense"]
    if fp8_kv and backend not in _PREFILL_IN_16_BIT:
        return replace(row, name=f"{row.name}, prefill in fp8", prefill=row.cached)
    return row
