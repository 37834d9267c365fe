"""Shapes: models as users run them, at their real tensor shapes, with few layers.

Pure: `inside/` makes the weights, `materialise` writes the folder.
"""

from __future__ import annotations

import copy
from typing import Any

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.models.catalogue import CATALOGUE

__all__ = ["SHAPES", "config_of", "default_quantization", "names", "properties"]

SHAPES = {shape.name: shape for shape in CATALOGUE}

# As the published checkpoints say it: DeepSeek-V3 (fp8), nvidia's NVFP4 ones (attention, router and head kept in bf16)
# and openai/gpt-oss-20b (mxfp4).
_UNQUANTIZED = ["lm_head", "model.embed_tokens", "*self_attn*", "*mlp.gate"]
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
        "ignore": _UNQUANTIZED,
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def names() -> tuple[str, ...]:
    """The shipped shapes, in the order they are documented."""
    return tuple(SHAPES)


def default_quantization(shape: str) -> str:
    """The quantization a shape is made in when the matrix names none: the one the model is served in."""
    return SHAPES[shape].quantizations[0]


def properties(shape: str) -> dict[str, str]:
    """What predicates see of a shape as `model.NAME`: attention, moe, quantization, and its `extra`."""
    known = SHAPES[shape]
    return {
        "attention": known.attention,
        "moe": "true" if known.moe else "false",
        "quantization": default_quantization(shape),
        **known.extra,
    }


def config_of(shape: str, *, layers: int | None = None, quantization: str | None = None) -> dict[str, Any]:
    """The `config.json` of a mini: `layers` as asked, in `quantization`.

    Raises UsageError if this shape's weights cannot be made in that quantization, or if `layers` leaves no MoE layer.
    """
    known = SHAPES[shape]
    quantization = quantization or default_quantization(shape)
    if quantization not in known.quantizations:
        raise UsageError(
            f"shape {shape} cannot be made with quantization {quantization}: "
            f"its weights are made in {', '.join(known.quantizations)}. "
            "Choose one of these, or use `path:` with real weights."
        )
    config = copy.deepcopy(dict(known.config))
    config["num_hidden_layers"] = layers or known.layers
    dense = config.get("first_k_dense_replace", 0)
    if known.moe and config["num_hidden_layers"] <= dense:
        raise UsageError(f"shape {shape} needs at least {dense + 1} layers: the first ones are dense")
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    config |= {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if quantization != "none":
        config["quantization_config"] = copy.deepcopy(_QUANTIZATION[quantization])
    return config
