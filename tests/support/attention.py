"""Random attention problems over a paged KV, and their answers by definition, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.memory.group_memory import GroupMemory
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.model.attention.backend import AttentionBackend, AttentionShape
from floodplain.model.batch import ForwardBatch, PrefillSegment


@dataclass(frozen=True)
class Problem:
    """A batch with its queries, new keys and values, a KV that is NaN outside of contexts, and the answer."""

    batch: ForwardBatch
    q: torch.Tensor
    new_kv: torch.Tensor
    kv: torch.Tensor
    answer: torch.Tensor

    def solve(self, backend: AttentionBackend) -> torch.Tensor:
        """Return a backend's output, [T, num_heads * head_dim]."""
        kv = self.kv.clone()
        plan = backend.plan(self.batch, self.q.dtype)
        plan.write(kv, self.new_kv)
        return plan.attend(self.q, self.new_kv, kv)


def make_problem(
    shape: AttentionShape,
    decodes: Sequence[int],
    prefills: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Problem:
    """Make a problem.

    Args:
        shape: Sizes.
        decodes: Context lengths, each with the token that is decoded.
        prefills: (tokens already in the KV, tokens of the run).
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = [(length - 1, 1) for length in decodes] + list(prefills)
    tables, num_blocks = _scattered_tables([sum(one) for one in sequences], shape.block_tokens, generator)
    kv = torch.full((num_blocks, 2, shape.block_tokens, shape.num_kv_heads, shape.head_dim), torch.nan, dtype=dtype)
    width = shape.num_heads + 2 * shape.num_kv_heads
    heads = torch.randn(sum(n for _, n in sequences), width, shape.head_dim, generator=generator).to(dtype)
    q = heads[:, : shape.num_heads]
    new_kv = heads[:, shape.num_heads :].view(-1, 2, shape.num_kv_heads, shape.head_dim)
    slots, positions, answers, row = [], [], [], 0
    for (start, count), table in zip(sequences, tables, strict=True):
        past = torch.randn(start, 2, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
        where = torch.arange(start + count)
        block, offset = table[where // shape.block_tokens], where % shape.block_tokens
        kv[block[:start], :, offset[:start]] = past
        slots.append((block * shape.block_tokens + offset)[start:])
        positions.append(where[start:])
        rows = slice(row, row + count)
        answers.append(attention_by_definition(q[rows], torch.cat((past, new_kv[rows]))))
        row += count
    batch = _make_batch(shape, decodes, prefills, tables, torch.cat(slots), torch.cat(positions), device)
    return Problem(batch, q.to(device), new_kv.to(device), kv.to(device), torch.cat(answers).to(device))


def moved_attention(
    device: Any, backend: Callable[[AttentionShape], AttentionBackend], forgets: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a layer's blocks in a pool, and after their pages moved to a group's memory.

    ``device`` provides some 30 pages of 2 MiB. With ``forgets``, block ids stay those of before the drop: a fault.
    """
    shape = AttentionShape(32, 8, 128, 16)
    problem = make_problem(shape, [300, 17, 64], [(50, 130)], device=str(device.torch_device))
    layout = KVLayout(num_layers=2, block_tokens=16, num_kv_heads=8, head_dim=128, dtype=problem.q.dtype)
    buffers = [PagedBuffer(device, 2 * device.page_bytes) for _ in range(layout.num_layers)]
    for buffer in buffers:
        buffer.map(device.allocate(buffer.num_pages) or [])
    size = layout.count_quantum_blocks(device.page_bytes)
    num_quanta = -(-problem.kv.shape[0] // size)
    pool = KVPool(device, layout, num_quanta * size)
    ledger = BlockLedger(0, layout.block_tokens, quantum_blocks=size)
    pool.grow(ledger, pool.max_blocks)
    pool.layers[1][: problem.kv.shape[0]] = problem.kv
    before = _attend(problem, backend(shape), problem.batch, pool.layers[1])
    quanta, first = pool.quanta, 1
    used = quanta[::-1]
    memory = GroupMemory(device, layout, buffers)
    memory.drop(pool.shrink(ledger, 0).pages, quanta, used, range(1, 2), first, num_quanta + 1)
    at = torch.tensor([first + used.index(quantum) for quantum in range(num_quanta)], device=problem.kv.device)

    def find(blocks: torch.Tensor) -> torch.Tensor:
        return blocks if forgets else at[blocks // size] * size + blocks % size

    batch = replace(
        problem.batch,
        slot_mapping=find(problem.batch.slot_mapping // 16) * 16 + problem.batch.slot_mapping % 16,
        block_tables=find(problem.batch.block_tables),
        prefills=tuple(replace(one, block_table=find(one.block_table)) for one in problem.batch.prefills),
    )
    return before, _attend(problem, backend(shape), batch, memory.layers[1])


def _attend(problem: Problem, backend: AttentionBackend, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
    plan = backend.plan(batch, problem.q.dtype)
    plan.write(kv, problem.new_kv)
    return plan.attend(problem.q, problem.new_kv, kv)


def attention_by_definition(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64: queries of the last ``len(q)`` tokens of ``kv`` [C, 2, num_kv_heads, head_dim]."""
    num_tokens, num_heads, head_dim = q.shape
    repeat = num_heads // kv.shape[2]
    keys, values = kv.double().repeat_interleave(repeat, dim=2).unbind(1)  # [C, num_heads, head_dim]
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / head_dim**0.5
    first = kv.shape[0] - num_tokens
    is_future = torch.arange(kv.shape[0]) > first + torch.arange(num_tokens)[:, None]
    weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def _scattered_tables(
    lengths: Sequence[int], block_tokens: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], int]:
    counts = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator)
    return list(shuffled[: sum(counts)].split(counts)), num_blocks


def _make_batch(
    shape: AttentionShape,
    decodes: Sequence[int],
    prefills: Sequence[tuple[int, int]],
    tables: Sequence[torch.Tensor],
    slots: torch.Tensor,
    positions: torch.Tensor,
    device: str,
) -> ForwardBatch:
    max_context = max(decodes, default=0)
    block_tables = torch.zeros(len(decodes), -(-max_context // shape.block_tokens), dtype=torch.int64)
    for padded, table in zip(block_tables, tables, strict=False):
        padded[: len(table)] = table
    segments, row = [], len(decodes)
    for (start, count), table in zip(prefills, tables[len(decodes) :], strict=True):
        segments.append(PrefillSegment(row, count, start + count, table.to(device)))
        row += count
    return ForwardBatch(
        token_ids=torch.zeros(row, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        block_tables=block_tables.to(device),
        context_lens=torch.tensor(decodes, dtype=torch.int64, device=device),
        max_context_len=max_context,
        prefills=tuple(segments),
        logits_rows=torch.arange(row, device=device),
    )
