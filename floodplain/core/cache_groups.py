"""Groups of layers that share a block table, in models whose layers keep different KV.

All groups take their blocks from one pool. A layer with full attention keeps the KV of all tokens. One with a sliding
window, or with chunked attention, keeps what its next token can see, and frees the blocks before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

UNBOUNDED = 2**62


class CacheKind(Enum):
    """What a group keeps of a sequence."""

    FULL = "full"
    """Every block; a full block never changes."""

    WINDOW = "window"
    """The blocks that the next token can see."""

    STATE = "state"
    """A state that each step rewrites, so that a copy belongs to one length of the sequence."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group; a sequence has at most ``most_blocks`` in it while it decodes."""

    block_tokens: int
    kind: CacheKind = CacheKind.FULL
    most_blocks: int = UNBOUNDED

    def count_blocks(self, num_tokens: int, num_new: int = 0) -> int:
        """Return how many blocks ``num_tokens`` take, of which a step computes the last ``num_new`` together."""
        num_blocks = -(-num_tokens // self.block_tokens)
        if num_blocks <= self.most_blocks:
            return num_blocks
        return min(num_blocks, self.most_blocks + -(-num_new // self.block_tokens))


def is_one_table(groups: Sequence[CacheGroup]) -> bool:
    """Whether all layers keep all tokens in one block table."""
    return len(groups) == 1 and groups[0].kind is CacheKind.FULL


def count_blocks(groups: Sequence[CacheGroup], num_tokens: int, num_new: int = 0) -> int:
    """Return the blocks that a sequence of ``num_tokens`` takes in all groups (``CacheGroup.count_blocks``)."""
    return sum([group.count_blocks(num_tokens, num_new) for group in groups])
