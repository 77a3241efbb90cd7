"""Finds the sources of an absent sequence's KV, block by block: on the device or in swap space."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.backups import Backup
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.sequence import Sequence
from floodplain.runtime.state import LoopState


@dataclass(frozen=True, slots=True)
class Source:
    """Source of one block: on the device already (``block``) or in swap space (``backup``).

    ``key`` is None for the partly filled last block, which is never shared. ``num_tokens`` counts the leading tokens of
    the sequence up to the end of this block.
    """

    key: BlockKey | None
    block: BlockId | None
    backup: Backup | None
    num_tokens: int


def find_sources(state: LoopState, seq: Sequence) -> list[Source]:
    """Sources of the longest run of leading blocks that exist; at least one token is left to compute."""
    block_tokens = state.ledger.block_tokens
    sources: list[Source] = []
    for key in seq.keys_for((len(seq.tokens) - 1) // block_tokens, block_tokens):
        block = state.ledger.find(key)
        backup = None if block is not None else state.backups.find_whole(key)
        if block is None and backup is None:
            break
        sources.append(Source(key, block, backup, (len(sources) + 1) * block_tokens))
    if seq.tail is not None and seq.tail[0].is_whole and seq.tail[1] // block_tokens == len(sources):
        sources.append(Source(None, None, *seq.tail))
    return sources
