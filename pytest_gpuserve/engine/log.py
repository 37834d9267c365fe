"""What SGLang's log says: phases, a start that cannot succeed any more, and quiet fallbacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Fallback", "Patterns", "fallback_lines", "patterns"]

# (a text the line holds, what it must match as well, the phase that begins). Tested in order on every line of the log,
# so the first test is a plain substring. Ranks prefix their lines (` TP0]`, ` DP1 TP0]`), progress bars end in a
# carriage return and come glued behind other text: no pattern is anchored.
_BEGINNINGS: tuple[tuple[str, re.Pattern[str] | None, Phase], ...] = (
    ("Init torch distributed begin", None, Phase.DIST_INIT),
    ("Init parallel begin", None, Phase.DIST_INIT),
    ("Load weight begin", None, Phase.WEIGHTS),
    ("Load weight end", re.compile(r"Load weight end(?!.*after CUDA graph capture)"), Phase.KV_CACHE),
    ("KV Cache ", re.compile(r"KV Cache (?:is allocated|VA upper bound)"), Phase.KV_CACHE),
    ("Memory pool end", None, Phase.KV_CACHE),
    # Autotuning runs the kernels of every batch size, just before capture and like it: minutes, little output.
    ("Running FlashInfer autotune", None, Phase.GRAPH_CAPTURE),
    (
        " begin",
        re.compile(r"Capture (?:\S+ )*(?:graph|single-CG draft extend) begin", re.IGNORECASE),
        Phase.GRAPH_CAPTURE,
    ),
    ("Capturing ", re.compile(r"Capturing (?:batches|num tokens)"), Phase.GRAPH_CAPTURE),
    ("max_total_num_tokens=", re.compile(r"max_total_num_tokens=\d+, chunked_prefill_size="), Phase.WARMUP),
    ("Started server process", None, Phase.WARMUP),
    ("Uvicorn running on", None, Phase.WARMUP),
    ("The server is fired up and ready to roll", None, Phase.READY),
    ("SIGTERM received", None, Phase.DRAINING),
    ("Gracefully exiting...", None, Phase.DRAINING),
)
# `[2026-11-29 16:33:24 DP1 TP0]`
_RANK = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})? ([^\]]{1,60})\]")
_BATCH = re.compile(r"\b((?:Prefill|Decode) batch[^,]{0,20}(?:, #[\w -]{1,20}: \d{1,9}){1,3})")
_LONGEST = 4_000  # characters: longer is the dump of all arguments
_OVERLAP = "capture-safe model"
_GRAPH_END = re.compile(r"Capture (?:\S+ )*(?:graph|single-CG draft extend) end", re.IGNORECASE)

# The whole start runs, then the port is found taken, then the server hangs, deaf to SIGTERM. uvicorn words it as
# `[Errno 98] error while attempting to bind on address`.
_PORT_TAKEN = re.compile(r"\[Errno 98\]|EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Patterns:
    """What to look for in the log of one SGLang release. All releases known so far share one tolerant set."""

    version: str

    def phase_of(self, line: str) -> Phase | None:
        """The phase that this line begins, whatever the server's phase is now; None for nearly every line."""
        for text, pattern, phase in _BEGINNINGS:
            if text in line and (pattern is None or pattern.search(line)):
                return phase
        return None

    def fatal(self, line: str) -> bool:
        """True if the server cannot get ready any more although its process may live on for ever."""
        return ("98" in line or "ddress" in line) and _PORT_TAKEN.search(line) is not None

    def overlap(self, line: str) -> bool:
        """True if this line says that weights arrive after graph capture (`--startup-weight-load-mode overlap`)."""
        return _OVERLAP in line

    def sets_up_model(self, line: str) -> bool:
        """True if a rank begins with a model here, which it does again for a draft model."""
        return "Init torch distributed begin" in line or "Load weight begin" in line

    def rank_of(self, line: str) -> str:
        """Which rank logs `line`, such as `DP1 TP0`; empty if there is only one."""
        stamp = _RANK.search(line)
        return stamp[1] if stamp else ""

    def batch_of(self, line: str) -> str:
        """`Decode batch, #running-req: 7, #token: 900`, if `line` tells of a batch; else empty."""
        batch = _BATCH.search(line) if " batch" in line and len(line) < _LONGEST else None
        return batch[1] if batch else ""

    def graph_end(self, line: str) -> bool:
        """True if a graph capture ended here; further ones may follow."""
        return " end" in line and _GRAPH_END.search(line) is not None


def patterns(version: str) -> Patterns:
    """The log patterns of that SGLang release."""
    return Patterns(version)


@dataclass(frozen=True, slots=True)
class Fallback:
    """SGLang used something else than was asked, and said so in one line.

    `subject` is what fell back, in the words of the flags: `attention-backend`, `custom-all-reduce`, `cuda-graph`,
    `moe-runner-backend`, `kv-cache-dtype`, `allreduce-fusion`, `radix-cache`, `page-size`, `kernels`, or `speed`: a
    line that warns of lower speed and names nothing known here.
    """

    subject: str
    what: str
    line: str


_FALLBACKS: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), subject, what)
    for pattern, subject, what in (
        (r"Setup Custom allreduce failed with", "custom-all-reduce", "custom all-reduce is off: its setup failed"),
        (r"Custom_?all_?reduce\w* is disabled", "custom-all-reduce", "custom all-reduce switched itself off"),
        (r"Custom-AR stays intra-node", "custom-all-reduce", "custom all-reduce without the fabric"),
        (r"custom all-?reduce not available; falling back", "custom-all-reduce", "another custom all-reduce is used"),
        (
            (
                r"Disabling flashinfer allreduce fusion|allreduce fusion (?:is )?(?:forcibly )?disabled|"
                r"Disable --enable-\w+-allreduce-fusion"
            ),
            "allreduce-fusion",
            "all-reduce fusion is off",
        ),
        (r"Setting attention backend to (\S+?)\.?$", "attention-backend", "attention backend replaced by {0}"),
        (r"will fallback to (\S+) backend", "attention-backend", "attention backend replaced by {0}"),
        (
            r"Attention backend is (?:set|overridden) to '?(\w+)",
            "attention-backend",
            "attention backend replaced by {0}",
        ),
        (r"Overriding --attention-backend \S+ -> '?(\w+)", "attention-backend", "attention backend replaced by {0}"),
        (
            r"Overriding draft attention backend to (\w+)",
            "attention-backend",
            "draft attention backend replaced by {0}",
        ),
        (
            r"FlashInfer is not available.*fall(?:ing)? ?back|falling back to Triton",
            "kernels",
            "Triton kernels instead",
        ),
        (
            (
                r"(?:CUDA|Cuda) graph is disabled|Cuda graph and server warmup are disabled|"
                r"Use triton backend without CUDA graph"
            ),
            "cuda-graph",
            "CUDA graphs are off",
        ),
        (r"Disable (?:\w+ )*(?:prefill|piecewise) CUDA graph", "cuda-graph", "prefill CUDA graphs are off"),
        (r"Piecewise cuda graph is disabled", "cuda-graph", "prefill CUDA graphs are off"),
        (r"Disable \w+ draft cuda graph", "cuda-graph", "draft CUDA graphs are off"),
        (
            r"quantization supports only .* backends?\. Overriding '?(\w+)",
            "moe-runner-backend",
            "MoE backend {0} replaced",
        ),
        (r"backends?\. Overriding '(\w+)'", "moe-runner-backend", "MoE backend {0} replaced"),
        (r"kv-cache-dtype falls back to '?(\w+)", "kv-cache-dtype", "KV cache dtype replaced by {0}"),
        (r"Disabling Radix Cache|Disabling radix cache|Radix cache is disabled", "radix-cache", "radix cache is off"),
        (
            r"only supports? (?:a )?page.?sizes? .*chang(?:e|ing) page_size from (\d+) to (\d+)",
            "page-size",
            "page size {1} instead of {0}",
        ),
        (r"falling back to (?:the )?(?:standard|slow|generic|regular)\b", "kernels", "a slower implementation is used"),
        # The parameters of a kernel were measured for other GPUs, or for none: what is slow then is often this.
        (
            (
                r"Config file not found at .*Fallback to triton|Using default MoE (?:kernel )?config|"
                r"Using MoE kernel config with down_moe=False|Down MoE config file not found"
            ),
            "kernels",
            "untuned MoE kernel configuration",
        ),
        (
            r"Using default (?:W8A8 )?(Block \w+) kernel config",
            "kernels",
            "untuned {0} GEMM configuration",
        ),
        (
            r"Weight-only (\w+) compression will be used",
            "kernels",
            "weight-only {0} (Marlin): this GPU computes no {0} itself",
        ),
        (r"Only use \d+ SMs for DeepEP", "kernels", "few SMs for DeepEP's communication"),
        (r"Disable DeepGEMM in batch invariant ops", "kernels", "batch-invariant kernels without DeepGEMM"),
        (r"fall(?:ing|s)? back to Transformers implementation", "kernels", "the model's code is Transformers' own"),
        # Whatever else says of itself that it is slow.
        (
            (
                r"performance (?:might|may|will|can|could) (?:not )?be (?:sub-?optimal|optimal|slow\w*|degraded|poor)|"
                r"(?:degrade|hurt|reduce|lower)s? (?:the )?performance|(?:suboptimal|degraded|poor) performance"
            ),
            "speed",
            "the log warns of lower speed",
        ),
    )
)
_HINT = re.compile(
    r"fall|disab|overrid|setting|chang|allreduce|is set to|without CUDA|default|perform|weight-only|config file|SMs",
    re.IGNORECASE,
)


def fallback_lines(lines: Iterable[str]) -> tuple[Fallback, ...]:
    """Every fallback the log admits, once each, in the log's order. What a level asked for decides whether it matters:
    a cell that disables graphs itself also reads "Cuda graph is disabled".
    """
    found: dict[tuple[str, str], Fallback] = {}
    for line in lines:
        if len(line) > _LONGEST or not _HINT.search(line):
            continue
        for pattern, subject, what in _FALLBACKS:
            if match := pattern.search(line):
                text = what.format(*match.groups())
                found.setdefault((subject, text), Fallback(subject, text, line.strip()))
                break
    return tuple(found.values())
