"""Attention on a CUDA device: a paged kernel for decodes; FlashInfer or torch over gathered contexts for prefills."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right

from floodplain.model.attention.backend import AttentionShape, attend_segment, context_rows, write_rows
from floodplain.model.attention.paged_prefill import FlashInferPrefill, open_flashinfer
from floodplain.model.batch import ForwardBatch, PrefillSegment


class CudaAttention:
    """The backend for ``cuda``; FlashInfer computes prefills unless refused. A plan is valid until the next one."""

    def __init__(self, shape: AttentionShape, *, may_use_flashinfer: bool = True) -> None:
        self._shape = shape
        self._may_use_flashinfer = may_use_flashinfer
        self._flashinfer: dict[torch.dtype, FlashInferPrefill | None] = {}

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> CudaAttentionPlan:
        """Prepare one forward pass."""
        device = batch.token_ids.device
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        if self._may_use_flashinfer and dtype not in self._flashinfer:
            self._flashinfer[dtype] = open_flashinfer(self._shape, dtype, device, num_processors)
        return CudaAttentionPlan(batch, self._shape, num_processors, self._flashinfer.get(dtype))


class CudaAttentionPlan:
    """Indices of one batch. Nothing here blocks on the batch's work on the device."""

    def __init__(
        self,
        batch: ForwardBatch,
        shape: AttentionShape,
        num_processors: int,
        flashinfer: FlashInferPrefill | None = None,
    ) -> None:
        self._shape = shape
        self._batch = batch
        self._num_processors = num_processors
        self._write_rows = write_rows(batch.slot_mapping, shape.block_tokens)
        self._flashinfer = flashinfer if batch.prefills else None
        if self._flashinfer is not None:
            self._flashinfer.plan(batch.prefills)
        by_torch = batch.prefills if flashinfer is None else ()
        self._prefills = tuple((segment, _gather_rows(segment, shape)) for segment in by_torch)

    def write(self, kv: torch.Tensor, new_kv: torch.Tensor) -> None:
        """Store [T, 2, num_kv_heads, head_dim] in the layer's slots."""
        kv.view(-1, self._shape.num_kv_heads, self._shape.head_dim).index_put_((self._write_rows,), new_kv)

    def attend(self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of all rows."""
        num_decodes = self._batch.num_decodes
        out = q.new_empty(q.shape)
        if num_decodes:
            self._decode(q[:num_decodes], kv, out[:num_decodes])
        if self._flashinfer is not None:
            self._flashinfer.run(q[num_decodes:], kv, out[num_decodes:])
        for segment, rows in self._prefills:
            run = slice(segment.first_row, segment.first_row + segment.num_tokens)
            out[run] = self._prefill(q[run], new_kv[run], kv, rows)
        return out.flatten(1)

    def _decode(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        from floodplain.model.attention.paged_decode import choose_num_splits, paged_decode

        batch, max_len = self._batch, self._batch.max_context_len
        num_splits = choose_num_splits(q.shape[0] * self._shape.num_kv_heads, max_len, self._num_processors)
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            paged_decode(q, kv, batch.block_tables, batch.context_lens, max_len, num_splits, out)

    def _prefill(
        self, q: torch.Tensor, new_kv: torch.Tensor, kv: torch.Tensor, gather_rows: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self._shape
        if gather_rows is not None:
            new_kv = kv.view(-1, shape.num_kv_heads, shape.head_dim)[gather_rows]  # [C, 2, heads, head_dim]
        keys, values = new_kv.permute(1, 2, 0, 3)[:, None]  # [1, num_kv_heads, C, head_dim] each
        mask = None if gather_rows is None else _lower_right(q.shape[0], new_kv.shape[0], q)
        return attend_segment(q, keys, values, mask, shape)


def _gather_rows(segment: PrefillSegment, shape: AttentionShape) -> torch.Tensor | None:
    """Rows [C, 2] of the segment's context; None if the context is only the segment itself."""
    if segment.context_len == segment.num_tokens:
        return None
    keys = context_rows(segment.block_table[None], segment.context_len, shape.block_tokens)[0]
    return torch.stack((keys, keys + shape.block_tokens), dim=1)


def _lower_right(num_tokens: int, num_context: int, like: torch.Tensor) -> torch.Tensor:
    """A causal mask in which the last query attends to everything. Flash attention supports it, but not float32."""
    if like.dtype == torch.float32:
        mask = torch.ones(num_tokens, num_context, dtype=torch.bool, device=like.device)
        return mask.tril_(num_context - num_tokens)
    return causal_lower_right(num_tokens, num_context)
