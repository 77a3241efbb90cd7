"""How many blocks sequences need, now and soon."""

from __future__ import annotations

from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View


def blocks_for(view: View, num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // view.block_tokens)


def blocks_due(view: View, row: SequenceView, num_steps: int) -> int:
    """Blocks that a running sequence needs beyond its own for all its tokens and those of ``num_steps`` steps."""
    if not row.is_decoding:
        return max(0, blocks_for(view, row.num_tokens + num_steps) - row.num_blocks)
    end_step = min(view.step + num_steps, row.end_step)
    if row.block_due_step >= end_step:
        return 0
    return 1 + (end_step - 1 - row.block_due_step) // view.block_tokens


def blocks_held(view: View, row: SequenceView) -> int:
    """Blocks that a sequence has on the device, or would have with all its tokens there."""
    return row.num_blocks if row.status is Status.RUNNING else blocks_for(view, row.num_tokens)
