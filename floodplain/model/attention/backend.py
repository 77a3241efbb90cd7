"""The interface between a model and the attention of a device, and the rows of KV that all devices read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

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

    def attend(self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of ``q`` [T, num_heads, head_dim], after ``write`` of ``new_kv``."""


class AttentionBackend(Protocol):
    """Makes plans. A slot that is in no context may hold any value, NaN included."""

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> AttentionPlan:
        """Prepare one forward pass whose activations and KV have this ``dtype``."""


def write_rows(slot_mapping: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Rows [T, 2] of the key and the value of each slot [T], in the view [num_blocks * 2 * block_tokens, ...]."""
    key_rows = slot_mapping + slot_mapping // block_tokens * block_tokens
    return torch.stack((key_rows, key_rows + block_tokens), dim=1)


def head_rows(key_rows: torch.Tensor, num_kv_heads: int, block_tokens: int) -> torch.Tensor:
    """Rows in the view [num_blocks * 2 * block_tokens * num_kv_heads, head_dim], head by head.

    Takes [B, C] from ``context_rows``; returns [2, B, num_kv_heads, C], the keys' rows, then the values'.
    """
    heads = torch.arange(num_kv_heads, device=key_rows.device)[:, None]
    keys = key_rows[:, None] * num_kv_heads + heads  # [B, H, C]
    return torch.stack((keys, keys + block_tokens * num_kv_heads))


def context_rows(block_tables: torch.Tensor, max_context_len: int, block_tokens: int) -> torch.Tensor:
    """Rows [B, max_context_len] of the keys of each sequence, in the view [num_blocks * 2 * block_tokens, ...]."""
    num_blocks = -(-max_context_len // block_tokens)
    first_rows = block_tables[:, :num_blocks, None] * (2 * block_tokens)
    rows = first_rows + torch.arange(block_tokens, device=block_tables.device)  # [B, blocks, block_tokens]
    return rows.flatten(1)[:, :max_context_len]


def attend_segment(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> torch.Tensor:
    """Attention [n, num_heads, head_dim] of one run's queries, by torch; causal without a mask.

    ``keys`` and ``values`` are [1, num_kv_heads, C, head_dim].
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.scale,
        enable_gqa=shape.group_size > 1,
    )
    return out[0].transpose(0, 1)
