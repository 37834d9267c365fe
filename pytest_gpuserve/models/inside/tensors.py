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

FP8_BLOCK = 128
NVFP4_GROUP = 16
MXFP4_GROUP = 32
# e4m3 reaches 448; normal numbers times 64 stay inside it up to 7 sigma.
FP8_SPREAD = 64.0
# Root mean square of e2m1's sixteen values, all equally likely.
E2M1_SPREAD = 2.926


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file.

    `kind` is what is stored: `bf16`, `f32`, `fp8` (e4m3), `bits` (random bytes: two e2m1 numbers each), `e8m0` (powers
    of two around `value`), `scale-f32` and `scale-fp8` (around `value`, different from place to place).
    `std` is the standard deviation of random numbers; with 0 every element is `value`.
    """

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
        quantization = config.get("quantization_config", {})
        self.method = {"modelopt": "nvfp4"}.get(quantization.get("quant_method"), quantization.get("quant_method"))

    def linear(
        self, name: str, out: int, fan_in: int, gain: float = 1.0, *, attention: bool = False
    ) -> Iterator[Tensor]:
        """A weight matrix [out, fan_in], quantized where the checkpoint of this model would be.

        fp8 checkpoints quantize attention too; NVFP4 ones leave it in bf16.
        """
        std = gain * fan_in**-0.5
        if self.method == "fp8":
            blocks = (-(-out // FP8_BLOCK), -(-fan_in // FP8_BLOCK))
            yield Tensor(f"{name}.weight", (out, fan_in), FP8_SPREAD, kind="fp8")
            yield Tensor(f"{name}.weight_scale_inv", blocks, value=std / FP8_SPREAD, kind="scale-f32")
        elif self.method == "nvfp4" and not attention:
            # std = e2m1 * weight_scale (e4m3, a group of 16) * weight_scale_2: the group's scale stays near 1.
            yield Tensor(f"{name}.weight", (out, fan_in // 2), kind="bits")
            yield Tensor(f"{name}.weight_scale", (out, fan_in // NVFP4_GROUP), kind="scale-fp8")
            yield Tensor(f"{name}.weight_scale_2", (), value=std / E2M1_SPREAD, kind="f32")
            yield Tensor(f"{name}.input_scale", (), value=8 / (448 * 6), kind="f32")
        else:
            yield Tensor(f"{name}.weight", (out, fan_in), std)

    def norm(self, name: str, size: int) -> Iterator[Tensor]:
        """A norm's weight, all ones."""
        yield Tensor(f"{name}.weight", (size,))

    def mlp(self, prefix: str, size: int) -> Iterator[Tensor]:
        """A gated MLP."""
        yield from self.linear(f"{prefix}.gate_proj", size, self.hidden)
        yield from self.linear(f"{prefix}.up_proj", size, self.hidden)
        yield from self.linear(f"{prefix}.down_proj", self.hidden, size)

    def gqa(self, prefix: str) -> Iterator[Tensor]:
        """Grouped-query attention, with query and key norms (Qwen3), biases and sinks (gpt-oss) where there are."""
        c = self.config
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        # Normed queries and keys do not feel their projection's scale: peaked attention comes from the norms there.
        normed = c["model_type"].startswith("qwen3")
        sizes = {"q": heads * size, "k": groups * size, "v": groups * size}
        for letter, out in sizes.items():
            gain = 2 if letter in "qk" and not normed else 1
            yield from self.linear(f"{prefix}.{letter}_proj", out, self.hidden, gain, attention=True)
            if c["attention_bias"]:
                yield Tensor(f"{prefix}.{letter}_proj.bias", (out,), 0.1)
        yield from self.linear(f"{prefix}.o_proj", self.hidden, heads * size, attention=True)
        if c["attention_bias"]:
            yield Tensor(f"{prefix}.o_proj.bias", (self.hidden,), 0.1)
        if normed:
            for letter in "qk":
                yield Tensor(f"{prefix}.{letter}_norm.weight", (size,), value=2.0)
        if c["model_type"] == "gpt_oss":
            yield Tensor(f"{prefix}.sinks", (heads,), 1.0)

    def mla(self, prefix: str) -> Iterator[Tensor]:
        """Multi-head latent attention (DeepSeek), with the indexer of sparse attention where there is one."""
        c = self.config
        heads, query, latent = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        yield from self.linear(f"{prefix}.q_a_proj", query, self.hidden, attention=True)
        yield from self.norm(f"{prefix}.q_a_layernorm", query)
        yield from self.linear(f"{prefix}.q_b_proj", heads * (nope + rope), query, 2, attention=True)
        yield from self.linear(f"{prefix}.kv_a_proj_with_mqa", latent + rope, self.hidden, attention=True)
        yield from self.norm(f"{prefix}.kv_a_layernorm", latent)
        yield from self.linear(f"{prefix}.kv_b_proj", heads * (nope + value), latent, 1.5, attention=True)
        yield from self.linear(f"{prefix}.o_proj", self.hidden, heads * value, attention=True)
        if "index_n_heads" in c:
            size = c["index_head_dim"]
            yield from self.linear(f"{prefix}.indexer.wq_b", c["index_n_heads"] * size, query, attention=True)
            yield from self.linear(f"{prefix}.indexer.wk", size, self.hidden, attention=True)
            yield from self.norm(f"{prefix}.indexer.k_norm", size)
            yield Tensor(f"{prefix}.indexer.k_norm.bias", (size,), value=0.0)
            yield Tensor(f"{prefix}.indexer.weights_proj.weight", (c["index_n_heads"], self.hidden), self.hidden**-0.5)

    def deepseek_moe(self, prefix: str) -> Iterator[Tensor]:
        """Routed and shared experts; the router is kept in bf16 and its bias in f32, as published."""
        c = self.config
        experts, size = c["n_routed_experts"], c["moe_intermediate_size"]
        yield Tensor(f"{prefix}.gate.weight", (experts, self.hidden), 2 * self.hidden**-0.5)
        yield Tensor(f"{prefix}.gate.e_score_correction_bias", (experts,), value=0.0, kind="f32")
        for expert in range(experts):
            yield from self.mlp(f"{prefix}.experts.{expert}", size)
        yield from self.mlp(f"{prefix}.shared_experts", size * c["n_shared_experts"])

    def qwen_moe(self, prefix: str) -> Iterator[Tensor]:
        """Routed experts behind a softmax router."""
        yield Tensor(f"{prefix}.gate.weight", (self.config["num_experts"], self.hidden), 2 * self.hidden**-0.5)
        for expert in range(self.config["num_experts"]):
            yield from self.mlp(f"{prefix}.experts.{expert}", self.config["moe_intermediate_size"])

    def gpt_oss_moe(self, prefix: str) -> Iterator[Tensor]:
        """All experts in one tensor, MXFP4: blocks of 32 e2m1 numbers with one power-of-two scale."""
        experts, size = self.config["num_local_experts"], self.config["intermediate_size"]
        yield Tensor(f"{prefix}.router.weight", (experts, self.hidden), 2 * self.hidden**-0.5)
        yield Tensor(f"{prefix}.router.bias", (experts,), 0.1)
        for name, out, fan_in in (("gate_up_proj", 2 * size, self.hidden), ("down_proj", self.hidden, size)):
            groups = fan_in // MXFP4_GROUP
            scale = fan_in**-0.5 / E2M1_SPREAD
            yield Tensor(f"{prefix}.experts.{name}_blocks", (experts, out, groups, MXFP4_GROUP // 2), kind="bits")
            yield Tensor(f"{prefix}.experts.{name}_scales", (experts, out, groups), value=scale, kind="e8m0")
            yield Tensor(f"{prefix}.experts.{name}_bias", (experts, out), 0.1)

    def feed_forward(self, layer: int, prefix: str) -> Iterator[Tensor]:
        """The MLP or the experts of one layer."""
        c = self.config
        if "num_local_experts" in c:
            return self.gpt_oss_moe(prefix)
        if "num_experts" in c:
            return self.qwen_moe(prefix)
        if "n_routed_experts" in c and layer >= c["first_k_dense_replace"]:
            return self.deepseek_moe(prefix)
        return self.mlp(prefix, c["intermediate_size"])

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the checkpoint."""
        c = self.config
        yield Tensor("model.embed_tokens.weight", (c["vocab_size"], self.hidden), 1.0)
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            yield from self.norm(f"{prefix}.input_layernorm", self.hidden)
            yield from self.norm(f"{prefix}.post_attention_layernorm", self.hidden)
            yield from (self.mla if "kv_lora_rank" in c else self.gqa)(f"{prefix}.self_attn")
            yield from self.feed_forward(layer, f"{prefix}.mlp")
        yield from self.norm("model.norm", self.hidden)
        yield Tensor("lm_head.weight", (c["vocab_size"], self.hidden), 2 * self.hidden**-0.5)


def tensors_of(config: dict[str, Any]) -> list[Tensor]:
    """The checkpoint's tensors for a `config.json`."""
    return list(Layout(config).tensors())
