"""OPT (arXiv:2205.01068): learned positions, layer norms, biases everywhere, a ReLU feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from floodplain.cost.model_shape import OPT_POSITION_OFFSET
from floodplain.model.batch import ForwardBatch
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Step
from floodplain.model.network.linear import MakeProjection
from floodplain.model.network.ops import LayerOps
from floodplain.model.network.parameters import ParameterSpec, Part, weight_and_bias

_PREFIX = "model.decoder."


def stem_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Both embedding tables; also a final norm if layers begin with their norms."""
    shape = config.shape
    num_positions = shape.max_position + OPT_POSITION_OFFSET
    specs = [
        ParameterSpec("embedding", (Part(f"{_PREFIX}embed_tokens.weight", (shape.vocab_size, shape.hidden_size)),)),
        ParameterSpec("positions", (Part(f"{_PREFIX}embed_positions.weight", (num_positions, shape.hidden_size)),)),
    ]
    if config.norm_first:
        specs += weight_and_bias("norm", {f"{_PREFIX}final_layer_norm": shape.hidden_size})
    return specs


def layer_specs(config: ModelConfig, index: int) -> list[ParameterSpec]:
    """The parameters of one layer; query, key and value rows are one matrix."""
    hidden, ffn, prefix = config.shape.hidden_size, config.shape.ffn_size, f"{_PREFIX}layers.{index}."
    return [
        *weight_and_bias("attention_norm", {f"{prefix}self_attn_layer_norm": hidden}),
        *weight_and_bias("ffn_norm", {f"{prefix}final_layer_norm": hidden}),
        *weight_and_bias("qkv", {f"{prefix}self_attn.{one}_proj": hidden for one in "qkv"}, hidden),
        *weight_and_bias("o", {f"{prefix}self_attn.out_proj": hidden}, hidden),
        *weight_and_bias("up", {f"{prefix}fc1": ffn}, hidden),
        *weight_and_bias("down", {f"{prefix}fc2": hidden}, ffn),
    ]


class _LayerNorm:
    def __init__(self, params: Mapping[str, torch.Tensor], name: str, eps: float) -> None:
        self._weight, self._bias, self._eps = params[f"{name}.weight"], params[f"{name}.bias"], eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class OptStem:
    """Embedding of tokens and positions, and the final norm."""

    def __init__(self, config: ModelConfig, params: Mapping[str, torch.Tensor], ops: LayerOps) -> None:
        self._embedding, self._positions = params["embedding"], params["positions"]
        self._norm = _LayerNorm(params, "norm", config.norm_eps) if config.norm_first else None

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Activations [T, hidden] of the tokens at their positions."""
        positions = F.embedding(batch.positions + OPT_POSITION_OFFSET, self._positions)
        return F.embedding(batch.token_ids, self._embedding) + positions

    def rotation(self, positions: torch.Tensor) -> None:
        """None: positions are learned."""

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm, if there is one."""
        return x if self._norm is None else self._norm(x)


class OptLayer:
    """One layer: attention, then a feed-forward part, each with a residual connection."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, torch.Tensor], project: MakeProjection, ops: LayerOps
    ) -> None:
        self._num_heads, self._head_dim = config.shape.num_heads, config.shape.head_dim
        self._norm_first = config.norm_first
        self._attention_norm = _LayerNorm(params, "attention_norm", config.norm_eps)
        self._ffn_norm = _LayerNorm(params, "ffn_norm", config.norm_eps)
        self._qkv, self._o, self._up, self._down = (
            project(params[f"{name}.weight"], params[f"{name}.bias"]) for name in ("qkv", "o", "up", "down")
        )

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Activations [T, hidden] in and out."""
        if self._norm_first:
            x = self._o.add_to(x, self._attention(self._attention_norm(x), step, kv))
            return self._down.add_to(x, F.relu(self._up(self._ffn_norm(x))))
        x = self._attention_norm(self._o.add_to(x, self._attention(x, step, kv)))
        return self._ffn_norm(self._down.add_to(x, F.relu(self._up(x))))

    def _attention(self, x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        heads = self._qkv(x).view(-1, 3 * self._num_heads, self._head_dim)
        queries = heads[:, : self._num_heads]
        new_kv = heads[:, self._num_heads :].view(-1, 2, self._num_heads, self._head_dim)
        step.attention.write(kv, new_kv)
        return step.attention.attend(queries, new_kv, kv)
