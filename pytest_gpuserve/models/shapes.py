"""Shapes: models as users run them, at their real tensor shapes, with few layers.

Every config value is the published one of the model named in `source`, except what `cut` lists: what a mini changes to
fit one GPU and a minute. The vocabulary is cut everywhere: the embedding and the output projection keep their width,
but a 130,000-row table only costs disk. Pure: `inside/` makes the weights, `materialise` writes the folder.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SHAPES", "Shape", "config_of", "names", "properties"]

VOCABULARY = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shipped model. `layers` is the default number of layers; `attention` is what `model.attention` reads.

    `quantizations` are those its weights can be made in ("none" is bf16); the first one is the default.
    """

    name: str
    title: str
    source: str
    attention: str
    layers: int
    config: Mapping[str, Any]
    moe: bool = False
    cut: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ("none",)
    extra: Mapping[str, str] = field(default_factory=dict)


def _llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        **changes,
    }


def _deepseek(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 16384,
        **changes,
    }


_SHAPES = (
    Shape(
        name="tiny-llama",
        title="a Llama small enough for SGLang's CPU engine",
        source="made for this project: GQA 4:2, head dim 32",
        attention="gqa",
        layers=2,
        config=_llama(
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=512,
            rope_theta=10000.0,
            max_position_embeddings=2048,
        ),
        extra={"head-dim": "32"},
    ),
    Shape(
        name="tiny-mla",
        title="a DeepSeek-V3-like MLA and MoE model at real MLA dimensions, everything else small",
        source="made for this project: kv_lora_rank 512, rope 64, nope 128, v 128 as in DeepSeek-V3",
        attention="mla",
        moe=True,
        layers=2,
        config=_deepseek(
            hidden_size=512,
            intermediate_size=1024,
            moe_intermediate_size=256,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=256,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            vocab_size=4096,
            max_position_embeddings=8192,
        ),
    ),
    Shape(
        name="llama-3",
        title="Llama 3.1 8B",
        source="https://huggingface.co/meta-llama/Llama-3.1-8B config.json",
        attention="gqa",
        layers=4,
        config=_llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=VOCABULARY,
            rope_theta=500000.0,
            max_position_embeddings=16384,
        ),
        cut=("32 layers to 4", "vocabulary 128256 to 32768", "context 131072 to 16384 and its rope scaling"),
        extra={"head-dim": "128"},
    ),
    Shape(
        name="deepseek-v3",
        title="DeepSeek-V3",
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3 config.json",
        attention="mla",
        moe=True,
        layers=2,
        config=_deepseek(vocab_size=VOCABULARY),
        cut=(
            "61 layers to 2 (1 dense)",
            "256 experts to 32, 8 groups kept",
            "vocabulary 129280 to 32768",
            "yarn rope scaling",
        ),
    ),
    Shape(
        name="kimi-k2.5",
        title="Kimi-K2.5, text backbone",
        source="https://huggingface.co/moonshotai/Kimi-K2.5 config.json (text_config)",
        attention="mla",
        moe=True,
        layers=2,
        config=_deepseek(
            num_attention_heads=64,
            num_key_value_heads=64,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            rope_theta=50000.0,
            vocab_size=VOCABULARY,
        ),
        cut=(
            "61 layers to 2 (1 dense)",
            "384 experts to 32",
            "vocabulary 163840 to 32768",
            "yarn rope scaling",
            "the vision tower",
        ),
    ),
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _SHAPES}


def names() -> tuple[str, ...]:
    """The shipped shapes, in the order they are documented."""
    return tuple(SHAPES)


def properties(shape: str) -> dict[str, str]:
    """What predicates see of a shape as `model.NAME`: attention, moe, and its `extra`."""
    known = SHAPES[shape]
    return {"attention": known.attention, "moe": "true" if known.moe else "false", **known.extra}


def config_of(shape: str, *, layers: int | None = None, quantization: str = "none") -> dict[str, Any]:
    """The `config.json` of a mini: `layers` as asked, in `quantization`.

    Raises UsageError if this shape's weights cannot be made in that quantization, or if `layers` leaves no MoE layer.
    """
    known = SHAPES[shape]
    if quantization not in known.quantizations:
        raise UsageError(
            f"shape {shape} cannot be made with quantization {quantization}: "
            f"its weights are made in {', '.join(known.quantizations)}. "
            "Choose one of these, or use `path:` with real weights."
        )
    config = copy.deepcopy(dict(known.config))
    config["num_hidden_layers"] = layers or known.layers
    if known.moe and config["num_hidden_layers"] <= config.get("first_k_dense_replace", 0):
        raise UsageError(
            f"shape {shape} needs at least {config['first_k_dense_replace'] + 1} layers: the first ones are dense"
        )
    config |= {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if quantization == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    return config
