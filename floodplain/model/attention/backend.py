"""The interface between a model and the attention of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from floodplain.model.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that attention needs. The KV of a layer is [num_blocks, 2, block_tokens, num_kv_heads, head_dim]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The factor on products of queries and keys."""
        return float(self.head_dim**-0.5)


class AttentionPlan(Protocol):
    """Attention for one batch: the same for every layer, so indices and masks are computed once."""

    def write(self, kv: torch.Tensor, new_kv: torch.Tensor) -> None:
        """Store the keys and values [T, 2, num_kv_heads, head_dim] of the batch's tokens in the layer's ``kv``."""
        ...

    def attend(self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of the queries ``q`` [T, num_heads, head_dim]; after ``write``.

        ``new_kv`` is what was just written: a prompt that starts at position 0 needs only that.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans. A slot that is in no context may hold any value, NaN included."""

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> AttentionPlan:
        """Prepare one forward pass whose activations and KV have this ``dtype``."""
        ...
