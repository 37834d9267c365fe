"""The resolved configuration: what `/server_info` reports and the start-up goes by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.sim import SGLANG_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpuserve.sim.behaviour import Behaviour

__all__ = ["Config", "resolve"]

_DEFAULT_CONTEXT = 32_768
_DEFAULT_VOCABULARY = 128_000
# What SGLang chooses where no --attention-backend is given (prototypes/preflight: 0.5.23, real packages): (MHA, MLA).
_DEFAULT_ATTENTION = {
    "cpu": ("torch_native", "torch_native"),
    "sm90": ("fa3", "fa3"),
    "sm100": ("trtllm_mha", "trtllm_mla"),
    "sm103": ("trtllm_mha", "trtllm_mla"),
    "sm120": ("flashinfer", "triton"),
    "sm121": ("flashinfer", "triton"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`args` are SGLang's argument destinations, resolved; `model` the model's config.json; `ranks` one a scheduler.

    `capacity` is the number of tokens the KV cache holds. `asked` is the attention backend that a scenario's
    fallback replaced, if any.
    """

    args: Mapping[str, Any]
    argv: Sequence[str]
    model: Mapping[str, Any]
    ranks: tuple[str, ...]
    capacity: int
    context: int
    vocabulary: int
    asked: str | None = None
    graphs: bool = field(default=True)

    @property
    def architecture(self) -> str:
        """The model's class."""
        names = self.model.get("architectures") or ["SimulatedForCausalLM"]
        return str(names[0])

    @property
    def served_name(self) -> str:
        """The model's name in the OpenAI API."""
        return str(self.args["served_model_name"])

    def server_info(self) -> dict[str, Any]:
        """The static part of `/server_info`."""
        return {
            **self.args,
            "launch_command": " ".join(self.argv),
            "status": "ready",
            "max_total_num_tokens": self.capacity,
            "max_req_input_len": self.context - 6,
            "version": SGLANG_VERSION,
            "frontend": "python",
            "simulated": True,
        }


def _model_config(path: str) -> dict[str, Any]:
    """The model's config.json, or nothing for a name that is no folder here (the simulation needs no model).

    OSError in transformers' words for a path that is missing.
    """
    folder = Path(path)
    if folder.is_absolute() and not folder.exists():
        raise OSError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. "
            "Use `repo_type` argument if needed."
        )
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config


def _ranks(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Rank prefixes as in SGLang's log: ` DP0 PP0 TP1`; a part is shown only where there is more than one."""
    replicas = 1 if args["enable_dp_attention"] or args["attn_dp_size"] not in (None, 1) else int(args["dp_size"])
    ranks = []
    for dp in range(replicas):
        for pp in range(int(args["pp_size"])):
            for tp in range(int(args["tp_size"])):
                parts = ((" DP", dp, replicas), (" PP", pp, args["pp_size"]), (" TP", tp, args["tp_size"]))
                ranks.append("".join(f"{name}{index}" for name, index, size in parts if int(size) > 1))
    return tuple(ranks)


def _graph_config(args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    parts = {}
    for phase, default in (("decode", "full"), ("prefill", "breakable")):
        off = args["disable_cuda_graph"] or args[f"disable_{phase}_cuda_graph"]
        backend = "disabled" if off else args[f"cuda_graph_backend_{phase}"] or default
        parts[phase] = {"backend": backend, "max_bs": args[f"cuda_graph_max_bs_{phase}"], "tc_compiler": "eager"}
    return parts


def resolve(given: Mapping[str, Any], argv: Sequence[str], arch: str, behaviour: Behaviour) -> Config:
    """`given` are the parsed arguments; `arch` the GPUs' (`cpu` without). OSError for a model path that is missing."""
    args = dict(given)
    model = _model_config(args["model_path"])
    text = model.get("text_config") or model
    mla = "kv_lora_rank" in text
    args["tokenizer_path"] = args["tokenizer_path"] or args["model_path"]
    args["served_model_name"] = args["served_model_name"] or args["model_path"]
    args["device"] = args["device"] or ("cpu" if arch == "cpu" else "cuda")
    asked = args["attention_backend"]
    if asked is None:
        asked = _DEFAULT_ATTENTION.get(arch, ("flashinfer", "flashinfer"))[mla]
    args["attention_backend"] = behaviour.fallback or asked
    if asked == "torch_native" and args["device"] == "cpu":
        args["disable_cuda_graph"] = True
    args["sampling_backend"] = args["sampling_backend"] or "flashinfer"
    args["grammar_backend"] = args["grammar_backend"] or "xgrammar"
    args["page_size"] = args["page_size"] or (64 if args["attention_backend"].startswith("trtllm") else 1)
    args["chunked_prefill_size"] = args["chunked_prefill_size"] or 8192
    args["mem_fraction_static"] = args["mem_fraction_static"] or 0.88
    args["cuda_graph_config"] = graphs = _graph_config(args)
    context = int(args["context_length"] or text.get("max_position_embeddings") or _DEFAULT_CONTEXT)
    return Config(
        args=args,
        argv=tuple(argv),
        model=model,
        ranks=_ranks(args),
        capacity=int(args["max_total_tokens"] or 262_144),
        context=context,
        vocabulary=int(text.get("vocab_size") or _DEFAULT_VOCABULARY),
        asked=asked if behaviour.fallback not in (None, asked) else None,
        graphs=any(part["backend"] != "disabled" for part in graphs.values()),
    )
