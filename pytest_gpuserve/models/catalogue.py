"""The shipped shapes. Each config value is the published one of the model in `source`, except what `cut` lists.

The vocabulary is cut everywhere: the embedding and the output projection keep their width, but 130,000 rows only cost
disk. Experts are cut to fit a card of 32 GB, keeping group and top-k rules.
"""

from __future__ import annotations

from typing import Any

from pytest_gpuserve.models.shape import Shape

__all__ = ["CATALOGUE"]

VOCABULARY = 32_768
_CUT_VOCABULARY = "the vocabulary, to 32768"
_HUB = "https://huggingface.co/"


def _dense(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        **changes,
    }


def _deepseek(
    architecture: str = "DeepseekV3ForCausalLM", model_type: str = "deepseek_v3", **changes: Any
) -> dict[str, Any]:
    mla = {
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
    }
    moe = {
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
    }
    # A model that says `rope_parameters` has no rope theta beside it.
    rope = {} if "rope_parameters" in changes else {"rope_theta": 10000.0}
    return _dense(architecture, model_type, **rope) | mla | moe | changes


_SPARSE = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_MLA_CUT = (
    "61 layers to 2, of which 1 dense",
    "256 experts to 32, 8 groups kept",
    _CUT_VOCABULARY,
    "the yarn rope scaling",
)

CATALOGUE = (
    Shape(
        name="tiny-llama",
        title="a Llama small enough for SGLang's CPU engine",
        source="made for this project: GQA 4:2, head dim 32",
        attention="gqa",
        layers=2,
        config=_dense(
            "LlamaForCausalLM",
            "llama",
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
        title="MLA and MoE at DeepSeek-V3's latent dimensions, everything else small",
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
        ),
        quantizations=("none", "fp8"),
    ),
    Shape(
        name="llama-3",
        title="Llama 3.1 8B",
        source=f"{_HUB}meta-llama/Llama-3.1-8B",
        attention="gqa",
        layers=4,
        config=_dense(
            "LlamaForCausalLM",
            "llama",
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
        ),
        cut=("32 layers to 4", _CUT_VOCABULARY, "context 131072 to 16384 and its rope scaling"),
        extra={"head-dim": "128"},
    ),
    Shape(
        name="qwen3",
        title="Qwen3-8B (query and key norms)",
        source=f"{_HUB}Qwen/Qwen3-8B",
        attention="gqa",
        layers=4,
        config=_dense(
            "Qwen3ForCausalLM",
            "qwen3",
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rope_theta=1000000.0,
        ),
        cut=("36 layers to 4", _CUT_VOCABULARY, "context 40960 to 16384"),
        quantizations=("none", "fp8"),
        extra={"head-dim": "128"},
    ),
    Shape(
        name="qwen3-moe",
        title="Qwen3-30B-A3B",
        source=f"{_HUB}Qwen/Qwen3-30B-A3B",
        attention="gqa",
        moe=True,
        layers=4,
        config=_dense(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_theta=1000000.0,
        ),
        cut=("48 layers to 4", _CUT_VOCABULARY, "context 40960 to 16384"),
        quantizations=("none", "fp8"),
        extra={"head-dim": "128"},
    ),
    Shape(
        name="deepseek-v3",
        title="DeepSeek-V3",
        source=f"{_HUB}deepseek-ai/DeepSeek-V3",
        attention="mla",
        moe=True,
        layers=2,
        config=_deepseek(),
        cut=_MLA_CUT,
        quantizations=("fp8", "none"),
    ),
    Shape(
        name="deepseek-v3.2",
        title="DeepSeek-V3.2 (sparse attention with an indexer)",
        source=f"{_HUB}deepseek-ai/DeepSeek-V3.2",
        attention="dsa",
        moe=True,
        layers=2,
        config=_deepseek("DeepseekV32ForCausalLM", "deepseek_v32", **_SPARSE),
        cut=_MLA_CUT,
        quantizations=("fp8", "none"),
        extra={"family": "deepseek"},
    ),
    Shape(
        name="kimi-k2.5",
        title="Kimi-K2.5, text backbone",
        source=f"{_HUB}moonshotai/Kimi-K2.5 (text_config)",
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
            rms_norm_eps=1e-5,
        ),
        cut=(
            "61 layers to 2, of which 1 dense",
            "384 experts to 32",
            _CUT_VOCABULARY,
            "the yarn rope scaling",
            "the vision tower",
            "int4 experts (compressed-tensors): made in bf16, fp8 or nvfp4",
        ),
        quantizations=("none", "fp8", "nvfp4"),
    ),
    Shape(
        name="glm-5",
        title="GLM-5 (sparse attention with an indexer, value dim 256)",
        source=f"{_HUB}zai-org/GLM-5, NVFP4: {_HUB}nvidia/GLM-5-NVFP4",
        attention="dsa",
        moe=True,
        layers=2,
        config=_deepseek(
            "GlmMoeDsaForCausalLM",
            "glm_moe_dsa",
            **_SPARSE | {"index_n_heads": 32},
            hidden_size=6144,
            intermediate_size=12288,
            num_attention_heads=64,
            num_key_value_heads=64,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            qk_head_dim=256,
            v_head_dim=256,
            head_dim=64,
            n_group=1,
            topk_group=1,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
            rope_interleave=True,
            indexer_rope_interleave=True,
        ),
        cut=("78 layers to 2, of which 1 dense", "256 experts to 32", _CUT_VOCABULARY, "context 202752 to 16384"),
        quantizations=("none", "fp8", "nvfp4"),
        extra={"family": "glm"},
    ),
    Shape(
        name="gpt-oss",
        title="gpt-oss-20b (MXFP4 experts, attention sinks, sliding windows)",
        source=f"{_HUB}openai/gpt-oss-20b",
        attention="gqa",
        moe=True,
        layers=4,
        config=_dense(
            "GptOssForCausalLM",
            "gpt_oss",
            hidden_size=2880,
            intermediate_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            experts_per_token=4,
            attention_bias=True,
            rms_norm_eps=1e-5,
            sliding_window=128,
            swiglu_limit=7.0,
            rope_theta=150000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            max_position_embeddings=131072,
        ),
        cut=("24 layers to 4", _CUT_VOCABULARY),
        quantizations=("mxfp4",),
        extra={"head-dim": "64", "sinks": "true"},
    ),
)
