"""The Llama family: Llama, Mistral, Qwen2 (query, key and value biases), Qwen3 (a norm on heads), Yi, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from floodplain.model.batch import ForwardBatch
from floodplain.model.network.config import ModelConfig, RopeConfig
from floodplain.model.network.decoder import Step
from floodplain.model.network.linear import MakeProjection
from floodplain.model.network.ops import LayerOps
from floodplain.model.network.parameters import ParameterSpec, Part, weight_and_bias
from floodplain.model.network.rope import Rotation, inverse_frequencies, rotation


def stem_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Embedding table and final norm."""
    shape = config.shape
    table = Part("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
    return [
        ParameterSpec("embedding", (table,)),
        ParameterSpec("norm", (Part("model.norm.weight", (shape.hidden_size,)),)),
    ]


def layer_specs(config: ModelConfig, index: int) -> list[ParameterSpec]:
    """The parameters of one layer; query, key and value rows are one matrix, gate and up rows another."""
    shape, prefix = config.shape, f"model.layers.{index}."
    hidden, ffn = shape.hidden_size, shape.ffn_size
    norms = {"input_norm": ("input_layernorm", hidden), "ffn_norm": ("post_attention_layernorm", hidden)}
    if config.qk_norm:
        norms |= {"q_norm": ("self_attn.q_norm", shape.head_dim), "k_norm": ("self_attn.k_norm", shape.head_dim)}

    def project(name: str, width: int, has_bias: bool, rows: Mapping[str, int]) -> list[ParameterSpec]:
        return weight_and_bias(name, {prefix + stored: size for stored, size in rows.items()}, width, has_bias=has_bias)

    qkv = {"self_attn.q_proj": shape.q_size, "self_attn.k_proj": shape.kv_size, "self_attn.v_proj": shape.kv_size}
    return [
        *(ParameterSpec(name, (Part(f"{prefix}{stored}.weight", (size,)),)) for name, (stored, size) in norms.items()),
        *project("qkv", hidden, shape.qkv_bias, qkv),
        *project("o", shape.q_size, config.o_bias, {"self_attn.o_proj": hidden}),
        *project("gate_up", hidden, config.mlp_bias, {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}),
        *project("down", ffn, config.mlp_bias, {"mlp.down_proj": hidden}),
    ]


class LlamaStem:
    """Embedding, rotation and final norm."""

    def __init__(self, config: ModelConfig, params: Mapping[str, torch.Tensor], ops: LayerOps) -> None:
        self._ops = ops
        self._embedding = params["embedding"]
        self._norm = params["norm"]
        self._eps = config.norm_eps
        rope = config.rope or RopeConfig()
        self._frequencies = inverse_frequencies(rope, config.shape.head_dim).to(self._embedding.device)
        self._rope_scale = rope.attention_factor

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens."""
        return F.embedding(batch.token_ids, self._embedding)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """The rotation at these positions."""
        return rotation(positions, self._frequencies, self._embedding.dtype, self._rope_scale)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return self._ops.rms_norm(x, self._norm, self._eps)


class LlamaLayer:
    """One layer: attention, then a gated feed-forward part, each with a residual connection."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, torch.Tensor], project: MakeProjection, ops: LayerOps
    ) -> None:
        shape = config.shape
        self._ops = ops
        self._num_heads, self._num_kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._eps = config.norm_eps
        self._input_norm, self._ffn_norm = params["input_norm"], params["ffn_norm"]
        self._q_norm, self._k_norm = params.get("q_norm"), params.get("k_norm")
        self._qkv, self._o, self._gate_up, self._down = (
            project(params[f"{name}.weight"], params.get(f"{name}.bias")) for name in ("qkv", "o", "gate_up", "down")
        )

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Activations [T, hidden] in and out."""
        ops, eps = self._ops, self._eps
        x = self._o.add_to(x, self._attention(ops.rms_norm(x, self._input_norm, eps), step, kv))
        gate_up = self._gate_up(ops.rms_norm(x, self._ffn_norm, eps))
        return self._down.add_to(x, ops.silu_mul(gate_up))

    def _attention(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = self._qkv(x).view(-1, num_heads + 2 * num_kv_heads, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            queries.copy_(F.rms_norm(queries, self._q_norm.shape, self._q_norm, self._eps))
            keys.copy_(F.rms_norm(keys, self._k_norm.shape, self._k_norm, self._eps))
        new_kv = self._ops.rotate_and_write(heads, num_heads, step, kv)
        return step.attention.attend(heads[:, :num_heads], new_kv, kv)
