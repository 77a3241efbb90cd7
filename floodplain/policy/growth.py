"""How many blocks sequences need, now and soon."""

from __future__ import annotations

from floodplain.core.cache_groups import CacheKind, count_blocks
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View


def blocks_for(view: View, num_tokens: int, num_new: int = 0) -> int:
    """Blocks that hold this many tokens, of which a step computes the last ``num_new`` together."""
    if view.groups:
        return count_blocks(view.groups, num_tokens, num_new)
    return -(-num_tokens // view.block_tokens)


def full_blocks(view: View, num_tokens: int) -> int:
    """Blocks of these tokens that no later token changes or frees."""
    num_full = num_tokens // view.block_tokens
    return num_full * sum(group.kind is CacheKind.FULL for group in view.groups) if view.groups else num_full


def blocks_due(view: View, row: SequenceView, num_steps: int) -> int:
    """Additional blocks that a running sequence needs for all its tokens and those of ``num_steps`` steps."""
    if not row.is_decoding:
        return max(0, blocks_for(view, row.num_tokens + num_steps) - row.num_blocks)
    end_step = min(view.step + num_steps, row.end_step)
    if row.block_due_step >= end_step:
        return 0
    if view.groups:
        num_tokens = row.num_scheduled + view.step - row.since_step
        return max(0, blocks_for(view, num_tokens + end_step - view.step) - blocks_for(view, num_tokens))
    return 1 + (end_step - 1 - row.block_due_step) // view.block_tokens


def blocks_held(view: View, row: SequenceView) -> int:
    """Blocks that a sequence has on the device, or would have with all its tokens there."""
    return row.num_blocks if row.status is Status.RUNNING else blocks_for(view, row.num_tokens)


def count_spare_blocks(view: View, num_steps: int) -> int:
    """Free blocks, at least, if all live requests stay resident for ``num_steps`` steps; negative: they do not fit."""
    if view.swapped or view.num_waiting > len(view.waiting):
        return -1
    if len(view.running) + len(view.loading) + len(view.waiting) > view.max_num_seqs:
        return -1
    num_free = view.num_available_blocks
    for row in view.waiting:
        num_free -= blocks_for(view, row.num_tokens + num_steps) - row.num_shared_blocks
    for row in view.loading:
        num_free -= blocks_for(view, row.num_tokens + num_steps) - row.num_blocks
    num_most = most_growth(view, num_steps)
    if num_free >= num_most and _only_decodes(view):
        return num_free - num_most  # fast path for a pool with room: streams cannot grow by more than num_most
    return num_free - sum(blocks_due(view, row, num_steps) for row in view.running)


def most_growth(view: View, num_steps: int) -> int:
    """Most blocks by which running streams grow in so many steps."""
    return len(view.running) * (1 + num_steps // view.block_tokens) * max(1, len(view.groups))


def _only_decodes(view: View) -> bool:
    return all(row.is_decoding for row in view.running)
