"""`/metrics` in Prometheus' text format, with SGLang's names and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpuserve.sim.requests import Engine

__all__ = ["metrics_text"]


def metrics_text(engine: Engine, startup_seconds: float) -> str:
    """Counters and gauges of one server. Health checks move none of them."""
    name = engine.config.served_name.replace("\\", "\\\\").replace('"', '\\"')
    common = f'engine_type="unified",model_name="{name}"'
    rank = f'{common},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    lines: list[str] = []
    for metric, values in (
        ("prompt_tokens_total", engine.prompt_tokens),
        ("generation_tokens_total", {stream: engine.tokens(stream=stream) for stream in (False, True)}),
        ("num_requests_total", engine.requests),
    ):
        lines.append(f"# TYPE sglang:{metric} counter")
        for stream, value in values.items():
            labels = f'engine_type="unified",is_streaming="{str(stream).lower()}",model_name="{name}"'
            lines.append(f"sglang:{metric}{{{labels}}} {float(value)}")
    lines += ["# TYPE sglang:num_aborted_requests_total counter"]
    lines += [f"sglang:num_aborted_requests_total{{{common}}} {float(engine.aborted)}"]
    lines += ["# TYPE sglang:cached_tokens_total counter"]
    lines += [f'sglang:cached_tokens_total{{cache_source="device",{common}}} {float(engine.cached_tokens)}']
    used = sum(one.prompt_tokens + len(one.ids) for one in engine.busy)
    for metric, gauge in (
        ("num_running_reqs", engine.running),
        ("num_queue_reqs", engine.queued),
        ("num_used_tokens", used),
        ("token_usage", engine.usage),
        ("gen_throughput", engine.clock.throughput),
        ("max_total_num_tokens", engine.config.capacity),
        ("context_len", engine.config.context),
        ("page_size", engine.config.args["page_size"]),
    ):
        lines += [f"# TYPE sglang:{metric} gauge", f"sglang:{metric}{{{rank}}} {float(gauge)}"]
    lines += ["# TYPE sglang:startup_time_seconds gauge"]
    lines += [f'sglang:startup_time_seconds{{{common},phase="tokenizer_e2e"}} {startup_seconds}']
    return "\n".join(lines) + "\n"
