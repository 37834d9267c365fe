"""Did the server use what the cell asked for? What it reports against the flags, and what its log admits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.engine import Fallback
    from pytest_gpuserve.model.cell import FlagValue

__all__ = ["Swap", "swaps"]

# A flag → the resolved name that shows what became of it. Older spellings of a flag mean the same.
_SHOWN_BY = {
    "attention-backend": "attention_backend",
    "prefill-attention-backend": "prefill_attention_backend",
    "decode-attention-backend": "decode_attention_backend",
    "dsa-prefill-backend": "dsa_prefill_backend",
    "nsa-prefill-backend": "dsa_prefill_backend",
    "dsa-decode-backend": "dsa_decode_backend",
    "nsa-decode-backend": "dsa_decode_backend",
    "moe-runner-backend": "moe_runner_backend",
    "moe-a2a-backend": "moe_a2a_backend",
    "fp8-gemm-backend": "fp8_gemm_backend",
    "fp8-gemm-runner-backend": "fp8_gemm_backend",
    "fp4-gemm-backend": "fp4_gemm_backend",
    "fp4-gemm-runner-backend": "fp4_gemm_backend",
    "sampling-backend": "sampling_backend",
    "kv-cache-dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "dtype": "dtype",
    "page-size": "page_size",
    "disable-cuda-graph": "disable_cuda_graph",
    "disable-radix-cache": "disable_radix_cache",
    "disable-custom-all-reduce": "disable_custom_all_reduce",
    "speculative-algorithm": "speculative_algorithm",
    "cuda-graph-backend-decode": "cuda_graph_decode",
    "cuda-graph-backend-prefill": "cuda_graph_prefill",
}
_SAME = {
    "bfloat16": "bf16",
    "float16": "half",
    "fp16": "half",
    "nsa": "dsa",
    "compressed": "dsv4",
    "nextn": "eagle",
    "frozen_kv_mtp": "eagle",  # what either name is with a draft model of Gemma 4
    "unquant": "none",
}
_CHOOSES = frozenset({"auto", "none", ""})
# With the second flag the first only names a convention, and the server resets it (SGLang 0.5.23,
# `handle_aux_hidden_state_capture`).
_RESET_BY = {"speculative-algorithm": "enable-return-aux-hidden-states"}
# What only the log tells: the subject of its line → the flags that asked for the opposite, with the asking value
# (None: any but false).
_ASKED_BY: dict[str, dict[str, bool | None]] = {
    "attention-backend": {
        "attention-backend": None,
        "prefill-attention-backend": None,
        "decode-attention-backend": None,
    },
    "custom-all-reduce": {"disable-custom-all-reduce": False},
    "allreduce-fusion": {"enable-flashinfer-allreduce-fusion": None, "flashinfer-allreduce-fusion-backend": None},
    "cuda-graph": {
        "disable-cuda-graph": False,
        "cuda-graph-backend-decode": None,
        "cuda-graph-backend-prefill": None,
    },
    "moe-runner-backend": {"moe-runner-backend": None},
    "kv-cache-dtype": {"kv-cache-dtype": None},
    "radix-cache": {"disable-radix-cache": False},
    "page-size": {"page-size": None},
}
# What such a flag asks for says nothing of the other phase's graphs, whose line has the same subject.
_NOT_ABOUT = {"cuda-graph-backend-decode": {"prefill", "draft"}, "cuda-graph-backend-prefill": {"draft"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """`flag` asked for `asked`, and the server uses `used`; `line` of its log says so, if one does."""

    flag: str
    asked: str
    used: str
    line: str = ""

    def __str__(self) -> str:
        text = f"--{self.flag} asked for {self.asked}, the server uses {self.used}"
        return f"{text}\n  its log: {self.line}" if self.line else text


def swaps(flags: Mapping[str, FlagValue], resolved: Mapping[str, object], log: Sequence[Fallback]) -> list[Swap]:
    """What was asked for and is not used. Only flags that are set ask for something: defaults may be whatever.

    A flag that was set and that the server reports as None was dropped: no release keeps what it uses unset.
    """
    found = []
    for name, value in flags.items():
        flag = name.lstrip("-")
        shown = _SHOWN_BY.get(flag)
        if shown is None or shown not in resolved or _chooses(value):
            continue
        used = resolved[shown]
        if value is False and not isinstance(used, bool):
            continue  # the flag is left out of the command line
        if used is None and flags.get(_RESET_BY.get(flag, "")):
            continue
        if _word(used) != _word(value):
            line = next((one.line for one in log if one.subject == _subject(flag)), "")
            found.append(Swap(flag=flag, asked=str(value), used="none" if used is None else str(used), line=line))
    told = {_subject(swap.flag) for swap in found}
    for fallback in log:
        asking = _asking(fallback, flags)
        if asking is not None and fallback.subject not in told:
            told.add(fallback.subject)
            found.append(Swap(flag=asking, asked=str(flags[asking]), used=fallback.what, line=fallback.line))
    return found


def _asking(fallback: Fallback, flags: Mapping[str, FlagValue]) -> str | None:
    """The flag of the cell that asked for what `fallback` says is not so."""
    for name, asking in _ASKED_BY.get(fallback.subject, {}).items():
        value = flags.get(name)
        if value is None or _chooses(value):
            continue
        if asking is None and value is False:
            continue
        if asking is not None and value is not asking:
            continue
        words = {_word(word) for word in fallback.what.split()}
        # "attention backend replaced by fa2" is what a cell wants that asked for fa2.
        if _word(value) not in words and not words & _NOT_ABOUT.get(name, set()):
            return name
    return None


def _subject(flag: str) -> str:
    for subject, names in _ASKED_BY.items():
        if flag in names:
            return subject
    return flag


def _chooses(value: object) -> bool:
    """True if the value leaves the choice to the server."""
    return str(value).lower() in _CHOOSES


def _word(value: object) -> str:
    text = str(value).lower()
    return _SAME.get(text, text)
