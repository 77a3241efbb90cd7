"""Attention on a CPU: by kernels that read blocks in place, or by torch over gathered contexts.

Query heads that share a key/value head are rows of one matrix, so grouped-query attention copies no keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from floodplain.model.attention.backend import AttentionShape, attend_segment, context_rows, head_rows, write_rows
from floodplain.model.batch import ForwardBatch, PrefillSegment
from floodplain.model.native.ops import NativeOps

MAX_WASTED_TOKENS = 512
"""Most padding of a group of decodes: reading it costs about as much as the calls for one more group."""

MAX_GROUP_TOKENS = 32_768
"""Most tokens of a group, padding included, so that gathered contexts stay small relative to the KV pool."""


FOLDED_PREFILL_TOKENS = range(64, 257)
"""Lengths of whole bfloat16 prompts for which two batched products beat torch's flash kernel (by 2 at 128 tokens)."""


class CpuAttention:
    """The backend for ``cpu``. ``native`` kernels compute decodes if they support these sizes."""

    def __init__(self, shape: AttentionShape, native: NativeOps | None = None) -> None:
        self._shape = shape
        has_kernel = native is not None and native.can_decode(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._native = native if has_kernel else None

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> CpuAttentionPlan:
        """Prepare one forward pass."""
        return CpuAttentionPlan(batch, self._shape, dtype, self._native)


class CpuAttentionPlan:
    """Indices and masks of one batch."""

    def __init__(
        self, batch: ForwardBatch, shape: AttentionShape, dtype: torch.dtype, native: NativeOps | None
    ) -> None:
        self._shape = shape
        self._native = native
        self._tables, self._lengths = batch.block_tables, batch.context_lens
        self._num_decodes = batch.num_decodes
        self._write_rows = write_rows(batch.slot_mapping, shape.block_tokens)
        groups = group_by_length(batch.context_lens.tolist()) if native is None else ()
        self._groups = tuple(_decode_group(batch, members, shape, dtype) for members in groups)
        self._segments = tuple(_segment(segment, shape, dtype) for segment in batch.prefills)

    def write(self, kv: torch.Tensor, new_kv: torch.Tensor) -> None:
        """Store [T, 2, num_kv_heads, head_dim] in the layer's slots."""
        width = self._shape.num_kv_heads * self._shape.head_dim
        kv.view(-1, width).index_put_((self._write_rows,), new_kv.reshape(-1, 2, width))

    def attend(self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of all rows."""
        num_decodes = self._num_decodes
        if not self._segments:
            return self._decode(q, kv)
        out = q.new_empty(q.shape[0], self._shape.num_heads * self._shape.head_dim)
        if num_decodes:
            out[:num_decodes] = self._decode(q[:num_decodes], kv)
        for segment in self._segments:
            out[segment.rows] = self._prefill(segment, q[segment.rows], new_kv[segment.rows], kv)
        return out

    def _decode(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.decode(q, kv, self._tables, self._lengths, self._shape.scale)
        if len(self._groups) == 1:
            return self._decode_group(self._groups[0], q, kv)
        out = q.new_empty(q.shape[0], self._shape.num_heads * self._shape.head_dim)
        for group in self._groups:
            out[group.members] = self._decode_group(group, q[group.members], kv)
        return out

    def _decode_group(self, group: _DecodeGroup, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        num_matrices = q.shape[0] * shape.num_kv_heads
        context = kv.view(-1, shape.head_dim).index_select(0, group.gather_rows)
        keys, values = context.view(2, num_matrices, -1, shape.head_dim)
        queries = q.reshape(num_matrices, shape.group_size, shape.head_dim)
        scores = torch.baddbmm(group.mask, queries, keys.mT, alpha=shape.scale)
        return torch.bmm(scores.softmax(-1), values).view(q.shape[0], -1)

    def _prefill(self, segment: _Segment, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        if segment.is_folded and segment.mask is not None:
            return self._prefill_folded(segment.mask, q, new_kv)
        if segment.gather_rows is None:
            keys, values = new_kv.permute(1, 2, 0, 3)[:, None]  # [1, num_kv_heads, n, head_dim] each
        else:
            context = kv.view(-1, shape.head_dim).index_select(0, segment.gather_rows)
            keys, values = context.view(2, 1, shape.num_kv_heads, -1, shape.head_dim)
        return attend_segment(q, keys, values, segment.mask, shape).flatten(1)

    def _prefill_folded(self, mask: torch.Tensor, q: torch.Tensor, new_kv: torch.Tensor) -> torch.Tensor:
        """Attention by two batched products: the query heads of a key/value head are stacked as rows."""
        shape, num_tokens = self._shape, q.shape[0]
        folded = q.unflatten(1, (shape.num_kv_heads, shape.group_size)).permute(1, 2, 0, 3).flatten(1, 2)  # type: ignore[no-untyped-call]
        keys, values = new_kv.permute(1, 2, 0, 3)  # [num_kv_heads, n, head_dim] each
        scores = torch.baddbmm(mask, folded, keys.mT, alpha=shape.scale)
        out = torch.bmm(scores.softmax(-1), values).view(shape.num_kv_heads, shape.group_size, num_tokens, -1)
        return out.permute(2, 0, 1, 3).flatten(1)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """``members`` are rows of the batch; ``gather_rows`` [2 * B * heads * C]; ``mask`` [B * heads, 1, C], additive."""

    members: torch.Tensor
    gather_rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Segment:
    """A prefill whose context is gathered by ``gather_rows`` and masked; both None: the context is its own tokens.

    If ``is_folded``, the context is its own tokens, too, with a mask [group_size * n, n] for the stacked heads.
    """

    rows: slice
    gather_rows: torch.Tensor | None
    mask: torch.Tensor | None
    is_folded: bool = False


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Split the indices of ``lengths`` into groups, each padded to its longest member within both limits."""
    longest = max(lengths, default=0)
    total = longest * len(lengths)
    if total <= MAX_GROUP_TOKENS and total - sum(lengths) <= MAX_WASTED_TOKENS:
        return [list(range(len(lengths)))] if lengths else []
    groups: list[list[int]] = [[]]
    wasted = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        wasted += longest - lengths[index]
        if wasted > MAX_WASTED_TOKENS or (len(groups[-1]) + 1) * longest > MAX_GROUP_TOKENS:
            groups.append([])
            longest, wasted = lengths[index], 0
        groups[-1].append(index)
    return [group for group in groups if group]


def _decode_group(batch: ForwardBatch, members: list[int], shape: AttentionShape, dtype: torch.dtype) -> _DecodeGroup:
    index = torch.tensor(members)
    tables, lengths = batch.block_tables, batch.context_lens
    if len(members) < batch.num_decodes:
        tables, lengths = tables[index], lengths[index]
    max_len = int(lengths.max())
    key_rows = context_rows(tables, max_len, shape.block_tokens)
    is_padding = torch.arange(max_len) >= lengths[:, None]
    # A masked score times garbage could still be NaN, so padding reads the sequence's first token instead.
    key_rows = torch.where(is_padding, key_rows[:, :1], key_rows)
    mask = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, -torch.inf)
    return _DecodeGroup(
        index,
        head_rows(key_rows, shape.num_kv_heads, shape.block_tokens).flatten(),
        mask.repeat_interleave(shape.num_kv_heads, dim=0)[:, None],
    )


def _segment(segment: PrefillSegment, shape: AttentionShape, dtype: torch.dtype) -> _Segment:
    rows = slice(segment.first_row, segment.first_row + segment.num_tokens)
    start = segment.context_len - segment.num_tokens
    if start == 0 and dtype == torch.bfloat16 and segment.num_tokens in FOLDED_PREFILL_TOKENS:
        later = torch.full((segment.num_tokens, segment.num_tokens), -torch.inf, dtype=dtype).triu_(1)
        return _Segment(rows, None, later.repeat(shape.group_size, 1), is_folded=True)
    if start == 0:
        return _Segment(rows, None, None)
    key_rows = context_rows(segment.block_table[None], segment.context_len, shape.block_tokens)
    hidden = torch.full((segment.num_tokens, segment.context_len), -torch.inf, dtype=dtype)
    gather_rows = head_rows(key_rows, shape.num_kv_heads, shape.block_tokens).flatten()
    return _Segment(rows, gather_rows, hidden.triu_(start + 1))
