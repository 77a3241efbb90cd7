"""Attention of one new token per sequence over a paged KV, in Triton (imported only on a CUDA device).

One program serves one sequence, one key/value head with all its query heads, and one split of the context; a second
kernel combines the splits (flash decoding: pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE_TOKENS = 64
_MIN_DOT_ROWS = 16
_MIN_SPLIT_TOKENS = 256
_LOG2_E = 1.4426950408889634


def choose_num_splits(num_programs: int, max_context_len: int, num_processors: int) -> int:
    """Splits of each context: enough for two programs per multiprocessor, none shorter than 256 tokens."""
    wanted = -(-2 * num_processors // max(num_programs, 1))
    return max(1, min(wanted, max_context_len // _MIN_SPLIT_TOKENS))


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    num_splits: int,
    out: torch.Tensor,
) -> None:
    """Write the attention of ``q`` into ``out``; each context is read in ``num_splits`` parts.

    Args:
        q: [B, num_heads, head_dim]; the last two dimensions are contiguous, as all of ``out`` is.
        kv: [num_blocks, 2, block_tokens, num_kv_heads, head_dim], contiguous.
        block_tables: [B, max_blocks], int64; rows may be strided.
        context_lens: [B], int64, at least 1.
    """
    num_sequences, num_heads, head_dim = q.shape
    block_tokens, num_kv_heads = kv.shape[2], kv.shape[3]
    split_tokens = -(-max_context_len // (num_splits * _TILE_TOKENS)) * _TILE_TOKENS
    num_splits = -(-max_context_len // split_tokens)
    is_split = num_splits > 1
    shape = (num_splits, num_sequences, num_heads)
    parts = q.new_empty((*shape, head_dim), dtype=torch.float32) if is_split else out
    log_sums = q.new_empty(shape, dtype=torch.float32) if is_split else out
    block_dim = triton.next_power_of_2(head_dim)
    _attend[(num_sequences, num_kv_heads, num_splits)](
        q,
        kv,
        block_tables,
        context_lens,
        parts,
        log_sums,
        q.stride(0),
        block_tables.stride(0),
        split_tokens,
        head_dim**-0.5 * _LOG2_E,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        group_rows=max(_MIN_DOT_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
        block_dim=max(_MIN_DOT_ROWS, block_dim),
        tile_tokens=_TILE_TOKENS,
        is_split=is_split,
        num_warps=4,
        num_stages=3,
    )
    if is_split:
        _combine[(num_sequences, num_heads)](
            parts,
            log_sums,
            context_lens,
            out,
            split_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
            block_dim=block_dim,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    parts_ptr,
    log_sums_ptr,
    q_stride,
    table_stride,
    split_tokens,
    scale,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    group_rows: tl.constexpr,
    block_dim: tl.constexpr,
    tile_tokens: tl.constexpr,
    is_split: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(lens_ptr + sequence).to(tl.int32)
    begin = split * split_tokens
    if begin >= context_len:
        return
    end = tl.minimum(begin + split_tokens, context_len)
    group: tl.constexpr = num_heads // num_kv_heads
    row, dim, tile = tl.arange(0, group_rows), tl.arange(0, block_dim), tl.arange(0, tile_tokens)
    head = kv_head * group + row
    is_query = (row < group)[:, None] & (dim < head_dim)[None, :]
    q = tl.load(q_ptr + sequence * q_stride + head[:, None] * head_dim + dim[None, :], mask=is_query, other=0.0)

    best = tl.full([group_rows], -float("inf"), tl.float32)
    total = tl.zeros([group_rows], tl.float32)
    acc = tl.zeros([group_rows, block_dim], tl.float32)
    for first in range(begin, end, tile_tokens):
        token = first + tile
        is_token = token < end
        block = tl.load(tables_ptr + sequence * table_stride + token // block_tokens, mask=is_token, other=0)
        # 64-bit offsets: a layer's KV can be longer than 2^31 numbers.
        key_row = block.to(tl.int64) * (2 * block_tokens) + token % block_tokens
        key = (key_row * num_kv_heads + kv_head) * head_dim
        # Slots past the context may hold NaN: they are not read.
        is_number = is_token[:, None] & (dim < head_dim)[None, :]
        k = tl.load(kv_ptr + key[:, None] + dim[None, :], mask=is_number, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        value = key + block_tokens * num_kv_heads * head_dim
        v = tl.load(kv_ptr + value[:, None] + dim[None, :], mask=is_number, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best

    result = acc / total[:, None]
    out_row = sequence * num_heads + head
    if is_split:
        out_row += split * tl.num_programs(0) * num_heads
        tl.store(log_sums_ptr + out_row, best + tl.log2(total), mask=row < group)
    target = parts_ptr + out_row[:, None].to(tl.int64) * head_dim + dim[None, :]
    tl.store(target, result.to(parts_ptr.dtype.element_ty), mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    parts_ptr,
    log_sums_ptr,
    lens_ptr,
    out_ptr,
    split_tokens,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    context_len = tl.load(lens_ptr + sequence).to(tl.int32)
    dim = tl.arange(0, block_dim)
    row = sequence * num_heads + head
    stride = tl.num_programs(0) * num_heads
    best = tl.load(log_sums_ptr + row)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([block_dim], tl.float32)
    for split in range(tl.cdiv(context_len, split_tokens)):
        part_row = (row + split * stride).to(tl.int64)
        log_sum = tl.load(log_sums_ptr + part_row)
        part = tl.load(parts_ptr + part_row * head_dim + dim, mask=dim < head_dim, other=0.0)
        new_best = tl.maximum(best, log_sum)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(log_sum - new_best)
        total = total * shrink + weight
        acc = acc * shrink + weight * part
        best = new_best
    result = acc / total
    tl.store(out_ptr + row * head_dim + dim, result.to(out_ptr.dtype.element_ty), mask=dim < head_dim)
