"""SGLang's HTTP side: which endpoint a release has, its token counter, and what it reports of itself."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.engine.version import release

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Endpoints", "ServerLoad", "endpoints", "load_of", "resolved_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Paths. `ready` is None where the release has no `/ready`: then `/health` 200 and a real generation decide.

    `health` generates a token and takes a second or more (sglang#8444): not polled while a check is measuring.
    `model_info` answers 200 before the warm-up: it says nothing of readiness. No key is needed for `health`, `ready`
    and `metrics`.
    """

    ready: str | None
    health: str = "/health"
    model_info: str = "/model_info"
    server_info: str = "/server_info"
    metrics: str = "/metrics"
    generate: str = "/generate"
    abort: str = "/abort_request"
    flush_cache: str = "/flush_cache"


def endpoints(version: str) -> Endpoints:
    """`/ready` came with 0.5.20; `/model_info` and `/server_info` were `/get_…` before 0.5.6."""
    number = release(version)
    if number < (0, 5, 6):
        return Endpoints(ready=None, model_info="/get_model_info", server_info="/get_server_info")
    return Endpoints(ready="/ready" if number >= (0, 5, 20) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Counters of `/metrics`, summed over ranks; None where the server does not say.

    `tokens` counts prompt and generated tokens together: a long prefill moves it too. Health checks do not move it.
    `posts` are the open HTTP POST requests.
    """

    tokens: int | None = None
    running: int | None = None
    queued: int | None = None
    posts: int | None = None

    @property
    def in_flight(self) -> int:
        """Requests the server says it has, 0 also where it does not say.

        The gauges lag (refreshed every 40 decode steps), and a streamed answer leaves the open requests as soon as it
        begins: 0 does not prove that there are none.
        """
        return max((self.running or 0) + (self.queued or 0), self.posts or 0)


_SAMPLE = re.compile(
    r"^sglang:(generation_tokens_total|prompt_tokens_total|num_running_reqs|num_queue_reqs|"
    r'http_requests_active(?=\{[^\n]*method="POST"))(?:\{[^\n]*\})? ([0-9.eE+-]+|NaN)\s*$',
    re.MULTILINE,
)


def load_of(metrics: str) -> ServerLoad:
    """Reads the text of `/metrics`."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        number = float(value)
        if not math.isnan(number):  # a gauge that was never set
            sums[name] = sums.get(name, 0.0) + number
    tokens = [sums[name] for name in ("generation_tokens_total", "prompt_tokens_total") if name in sums]
    whole = {name: round(value) for name, value in sums.items()}
    return ServerLoad(
        tokens=round(sum(tokens)) if tokens else None,
        running=whole.get("num_running_reqs"),
        queued=whole.get("num_queue_reqs"),
        posts=whole.get("http_requests_active"),
    )


# Our name → the names that releases gave it, newest first.
_RESOLVED: dict[str, tuple[str, ...]] = {
    "attention_backend": ("attention_backend",),
    "prefill_attention_backend": ("prefill_attention_backend",),
    "decode_attention_backend": ("decode_attention_backend",),
    "dsa_prefill_backend": ("dsa_prefill_backend", "nsa_prefill_backend"),
    "dsa_decode_backend": ("dsa_decode_backend", "nsa_decode_backend"),
    "moe_runner_backend": ("moe_runner_backend",),
    "moe_a2a_backend": ("moe_a2a_backend",),
    "fp8_gemm_backend": ("fp8_gemm_runner_backend", "fp8_gemm_backend"),
    "fp4_gemm_backend": ("fp4_gemm_runner_backend", "fp4_gemm_backend"),
    "sampling_backend": ("sampling_backend",),
    "grammar_backend": ("grammar_backend",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "quantization": ("quantization",),
    "dtype": ("dtype",),
    "page_size": ("page_size",),
    "device": ("device",),
    "tp_size": ("tp_size",),
    "dp_size": ("dp_size",),
    "pp_size": ("pp_size",),
    "ep_size": ("ep_size",),
    "attn_dp_size": ("attn_dp_size",),
    "mem_fraction_static": ("mem_fraction_static",),
    "chunked_prefill_size": ("chunked_prefill_size",),
    "max_running_requests": ("max_running_requests",),
    "max_total_num_tokens": ("max_total_num_tokens",),
    "context_length": ("context_length",),
    "disable_cuda_graph": ("disable_cuda_graph",),
    "disable_radix_cache": ("disable_radix_cache",),
    "disable_overlap_schedule": ("disable_overlap_schedule",),
    "disable_custom_all_reduce": ("disable_custom_all_reduce",),
    "enable_torch_compile": ("enable_torch_compile",),
    "speculative_algorithm": ("speculative_algorithm",),
    "load_format": ("load_format",),
}


def resolved_of(server_info: Mapping[str, Any], version: str = "") -> dict[str, object]:
    """The configuration the server says it runs with, under one set of names for all releases.

    A name the server does not report is absent. `cuda_graph_decode` and `cuda_graph_prefill` are the capture backends
    (`full`, `breakable`, `disabled`, …) where the release reports them, and then decide `disable_cuda_graph`.
    """
    resolved: dict[str, object] = {}
    for name, keys in _RESOLVED.items():
        for key in keys:
            if key in server_info:
                resolved[name] = server_info[key]
                break
    config = server_info.get("cuda_graph_config")
    if isinstance(config, dict):
        for phase in ("decode", "prefill"):
            part = config.get(phase)
            if isinstance(part, dict) and "backend" in part:
                resolved[f"cuda_graph_{phase}"] = part["backend"]
        if "cuda_graph_decode" in resolved:
            resolved["disable_cuda_graph"] = resolved["cuda_graph_decode"] == "disabled"
    resolved["version"] = server_info.get("version", version)
    return resolved
