"""The shapes of transformer decoders: the independent numbers, from which all others are derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from floodplain.core.errors import UserError

OPT_POSITION_OFFSET = 2
"""Unused rows at the start of OPT's table of learned positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder: ``llama`` (RMS norm, rotary positions, gated FFN) or ``opt`` (layer norm, learned positions).

    ``num_heads`` query heads and ``num_kv_heads`` key/value heads have ``head_dim`` numbers each. ``tied_embeddings``:
    the output projection is the embedding table. ``max_position`` is the longest context in tokens. Of a mixture of
    experts (``num_experts`` above 0), ``ffn_size`` is that of one expert, and a token is computed by
    ``experts_per_token`` of them.
    """

    name: str
    family: Literal["llama", "opt"] = "llama"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and also of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_ffn_matrices(self) -> int:
        """Weight matrices of the feed-forward part: gate, up and down, or up and down."""
        return 3 if self.family == "llama" else 2

    @property
    def layer_params(self) -> int:
        """Parameters of one layer."""
        hidden, ffn = self.hidden_size, self.ffn_size
        matrices = hidden * (2 * self.q_size + 2 * self.kv_size + self.num_experts)  # the last: which experts
        matrices += max(1, self.num_experts) * self.expert_params
        qkv_biases = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        norms_and_biases = 2 * hidden if self.family == "llama" else 6 * hidden + ffn
        return matrices + qkv_biases + norms_and_biases

    @property
    def expert_params(self) -> int:
        """Parameters of the feed-forward matrices of one expert; of all of them, if there are no experts."""
        return self.num_ffn_matrices * self.hidden_size * self.ffn_size

    def count_active_experts(self, num_tokens: int) -> float:
        """Experts of a layer that any of the tokens is routed to, expected if all are equally likely; 1 without any."""
        if not self.num_experts:
            return 1.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)

    @property
    def embedding_params(self) -> int:
        """Parameters outside the layers: embeddings, output projection, final norm."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        if self.family == "llama":
            return tables + self.hidden_size
        return tables + (self.max_position + OPT_POSITION_OFFSET + 2) * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.num_layers * self.layer_params + self.embedding_params

    def layer_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of one layer's parameters."""
        return self.layer_params * dtype_bytes

    def param_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of all parameters."""
        return self.num_params * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = 2, num_shards: int = 1) -> int:
        """Bytes of keys and values of one token in all layers, on each of the GPUs that share them.

        A GPU has at least one head: with more GPUs than KV heads, several have the same.
        """
        return 2 * self.num_layers * self.kv_size * dtype_bytes // min(num_shards, self.num_kv_heads)


_COLUMNS = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size", "max_position",
)  # fmt: skip
_QKV_BIAS, _TIED = {"qkv_bias": True}, {"tied_embeddings": True}
_OPT: dict[str, Any] = {"family": "opt", **_QKV_BIAS, **_TIED}
_TABLE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "llama-3.1-8b": ((32, 4096, 32, 8, 128, 14336, 128256, 131072), {}),
    "llama-3.1-70b": ((80, 8192, 64, 8, 128, 28672, 128256, 131072), {}),
    "yi-34b-200k": ((60, 7168, 56, 8, 128, 20480, 64000, 200000), {}),
    "llama-13b": ((40, 5120, 40, 40, 128, 13824, 32000, 2048), {}),
    "qwen2.5-14b": ((48, 5120, 40, 8, 128, 13824, 152064, 131072), _QKV_BIAS),
    "qwen2.5-72b": ((80, 8192, 64, 8, 128, 29568, 152064, 131072), _QKV_BIAS),
    "codellama-34b": ((48, 8192, 64, 8, 128, 22016, 32000, 16384), {}),
    "qwen3-32b": ((64, 5120, 64, 8, 128, 25600, 151936, 40960), {}),
    "qwen3-30b-a3b": ((48, 2048, 32, 4, 128, 768, 151936, 40960), {"num_experts": 128, "experts_per_token": 8}),
    "smollm2-135m": ((30, 576, 9, 3, 64, 1536, 49152, 8192), _TIED),
    "llama-2-70b": ((80, 8192, 64, 8, 128, 28672, 32000, 4096), {}),
    "opt-13b": ((40, 5120, 40, 40, 128, 20480, 50272, 2048), _OPT),
    "opt-30b": ((48, 7168, 56, 56, 128, 28672, 50272, 2048), _OPT),
    "tiny-llama": ((2, 64, 4, 2, 16, 128, 288, 2048), {}),
    "tiny-deep": ((12, 64, 4, 2, 16, 128, 288, 2048), {}),
    "tiny-qwen": ((3, 48, 6, 2, 8, 96, 288, 2048), _QKV_BIAS | _TIED),
    "tiny-opt": ((2, 64, 4, 4, 16, 256, 288, 2048), _OPT),
}

SHAPES = {
    name: ModelShape(name=name, **dict(zip(_COLUMNS, numbers, strict=True)), **others)
    for name, (numbers, others) in _TABLE.items()
}
"""All shapes by name: published models (from their configuration files), and tiny ones for tests."""


def shape_named(name: str) -> ModelShape:
    """The shape called ``name``, in any case of letters; UserError, with all names, if there is none."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise UserError(f"no model shape is called {name!r}; there are {', '.join(sorted(SHAPES))}")
    return shape
