"""Which tensors a model's checkpoint holds, at which scale. Pure; run inside the environment under test.

The scale makes the output say something. SGLang's own dummy weights are uniform in ±0.001: every logprob is then
-ln(vocabulary), and a model whose rope theta is 10 % wrong gives the same bits. Here: unit embeddings, fan-in scaling,
queries and keys twice that (attention is peaked), the output projection twice that (logprobs spread by about 2 nats).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Tensor:
    """One tensor. `std` 0 means constant `value`; `kind` is the stored type: bf16, f32, or fp8 (with block scales)."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 1.0
    kind: str = "bf16"


class Layout:
    """Names tensors the way the architecture's checkpoint does."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.hidden = config["hidden_size"]
        self.fp8 = config.get("quantization_config", {}).get("quant_method") == "fp8"

    def linear(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> Iterator[Tensor]:
        """A weight matrix [out, fan_in], quantized where the checkpoint of this model would be."""
        yield Tensor(f"{name}.weight", (out, fan_in), gain * fan_in**-0.5, kind="fp8" if self.fp8 else "bf16")

    def norm(self, name: str, size: int) -> Iterator[Tensor]:
        """A norm's weight, all ones."""
        yield Tensor(f"{name}.weight", (size,))

    def mlp(self, prefix: str, size: int) -> Iterator[Tensor]:
        """A gated MLP."""
        yield from self.linear(f"{prefix}.gate_proj", size, self.hidden)
        yield from self.linear(f"{prefix}.up_proj", size, self.hidden)
        yield from self.linear(f"{prefix}.down_proj", self.hidden, size)

    def gqa(self, prefix: str) -> Iterator[Tensor]:
        """Grouped-query attention."""
        c = self.config
        size = c.get("head_dim") or self.hidden // c["num_attention_heads"]
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        yield from self.linear(f"{prefix}.q_proj", heads * size, self.hidden, 2)
        yield from self.linear(f"{prefix}.k_proj", groups * size, self.hidden, 2)
        yield from self.linear(f"{prefix}.v_proj", groups * size, self.hidden)
        yield from self.linear(f"{prefix}.o_proj", self.hidden, heads * size)

    def mla(self, prefix: str) -> Iterator[Tensor]:
        """Multi-head latent attention (DeepSeek)."""
        c = self.config
        heads, query, latent = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        yield from self.linear(f"{prefix}.q_a_proj", query, self.hidden)
        yield from self.norm(f"{prefix}.q_a_layernorm", query)
        yield from self.linear(f"{prefix}.q_b_proj", heads * (nope + rope), query, 2)
        yield from self.linear(f"{prefix}.kv_a_proj_with_mqa", latent + rope, self.hidden)
        yield from self.norm(f"{prefix}.kv_a_layernorm", latent)
        yield from self.linear(f"{prefix}.kv_b_proj", heads * (nope + value), latent, 1.5)
        yield from self.linear(f"{prefix}.o_proj", self.hidden, heads * value)

    def deepseek_moe(self, prefix: str) -> Iterator[Tensor]:
        """Routed and shared experts; the router is kept in bf16 and its bias in f32, as published."""
        c = self.config
        experts, size = c["n_routed_experts"], c["moe_intermediate_size"]
        yield Tensor(f"{prefix}.gate.weight", (experts, self.hidden), 2 * self.hidden**-0.5)
        yield Tensor(f"{prefix}.gate.e_score_correction_bias", (experts,), value=0.0, kind="f32")
        for expert in range(experts):
            yield from self.mlp(f"{prefix}.experts.{expert}", size)
        yield from self.mlp(f"{prefix}.shared_experts", size * c["n_shared_experts"])

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the checkpoint."""
        c = self.config
        yield Tensor("model.embed_tokens.weight", (c["vocab_size"], self.hidden), 1.0)
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            yield from self.norm(f"{prefix}.input_layernorm", self.hidden)
            yield from self.norm(f"{prefix}.post_attention_layernorm", self.hidden)
            yield from (self.mla if "kv_lora_rank" in c else self.gqa)(f"{prefix}.self_attn")
            if c.get("n_routed_experts") and layer >= c["first_k_dense_replace"]:
                yield from self.deepseek_moe(f"{prefix}.mlp")
            else:
                yield from self.mlp(f"{prefix}.mlp", c["intermediate_size"])
        yield from self.norm("model.norm", self.hidden)
        yield Tensor("lm_head.weight", (c["vocab_size"], self.hidden), 2 * self.hidden**-0.5)


def tensors_of(config: dict[str, Any]) -> list[Tensor]:
    """The checkpoint's tensors for a `config.json`."""
    return list(Layout(config).tensors())
