"""Attention on a CUDA device: a paged kernel for decodes, torch's flash attention over gathered contexts for prefills."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from floodplain.engine.attention.backend import AttentionShape
from floodplain.engine.attention.rows import context_rows, write_rows
from floodplain.engine.batch import ForwardBatch, PrefillSegment


class CudaAttention:
    """The backend for ``cuda``."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> CudaAttentionPlan:
        """Prepare one forward pass."""
        return CudaAttentionPlan(batch, self._shape)


class CudaAttentionPlan:
    """Indices of one batch. Nothing here waits for the device."""

    def __init__(self, batch: ForwardBatch, shape: AttentionShape) -> None:
        self._shape = shape
        self._batch = batch
        self._write_rows = write_rows(batch.slot_mapping, shape.block_tokens)
        self._prefills = tuple((segment, _gather_rows(segment, shape)) for segment in batch.prefills)

    def write(self, kv: torch.Tensor, new_kv: torch.Tensor) -> None:
        """Store [T, 2, num_kv_heads, head_dim] in the layer's slots."""
        kv.view(-1, self._shape.num_kv_heads, self._shape.head_dim).index_put_((self._write_rows,), new_kv)

    def attend(self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of all rows."""
        from floodplain.engine.attention.paged_decode import paged_decode

        batch, num_decodes = self._batch, self._batch.num_decodes
        out = q.new_empty(q.shape)
        if num_decodes:
            decodes = slice(0, num_decodes)
            paged_decode(q[decodes], kv, batch.block_tables, batch.context_lens, batch.max_context_len, out[decodes])
        for segment, rows in self._prefills:
            run = slice(segment.first_row, segment.first_row + segment.num_tokens)
            out[run] = self._prefill(q[run], new_kv[run], kv, rows)
        return out.flatten(1)

    def _prefill(
        self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor, gather_rows: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self._shape
        if gather_rows is not None:
            new_kv = kv.view(-1, shape.num_kv_heads, shape.head_dim)[gather_rows]  # [C, 2, heads, head_dim]
        keys, values = new_kv.permute(1, 2, 0, 3)[:, None]  # [1, num_kv_heads, C, head_dim] each
        num_tokens, num_context = q.shape[0], new_kv.shape[0]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=None if gather_rows is None else causal_lower_right(num_tokens, num_context),
            is_causal=gather_rows is None,
            scale=shape.scale,
            enable_gqa=shape.group_size > 1,
        )
        return out[0].transpose(0, 1)


def _gather_rows(segment: PrefillSegment, shape: AttentionShape) -> torch.Tensor | None:
    """Rows [C, 2] of the segment's context, or None if that is just the segment itself."""
    if segment.context_len == segment.num_tokens:
        return None
    keys = context_rows(segment.block_table[None], segment.context_len, shape.block_tokens)[0]
    return torch.stack((keys, keys + shape.block_tokens), dim=1)
