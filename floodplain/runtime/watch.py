"""Cache of what can be restored of each absent sequence without computing, refreshed only after changes.

A prefix can be hundreds of blocks long and a hundred requests may wait for it: a lookup for each of them at every step
would cost more than everything else that the loop does. So each result is kept with the contents that it depends on,
and is dropped when one of these appears, vanishes or changes its owner, or a copy of it begins or ends.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from floodplain.core.backups import Backup
from floodplain.core.block_state import BlockState
from floodplain.core.changes import ChangeReader
from floodplain.core.hashing import BlockKey
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence
from floodplain.runtime.state import LoopState


@dataclass(frozen=True, slots=True)
class Found:
    """What can be restored of one sequence.

    Attributes:
        num_hit_blocks: Leading blocks that are on the device.
        num_shared_hits: Hits that other sequences hold, so that sharing them costs no available block.
        num_device_blocks: Blocks on the device in the leading run that can be restored, hits included.
        num_shared_blocks: Those of these that other sequences hold.
        num_backed_blocks: Blocks of that run that only swap space has.
        num_restorable_tokens: Tokens of that run.
        next_copy: The first content of that run that must be copied and that others may share; None if there is none.
        is_arriving: An inbound copy in flight brings it already.
        watched: The contents that this result depends on: those of the run, and the first missing one.
    """

    num_hit_blocks: int
    num_shared_hits: int
    num_device_blocks: int
    num_shared_blocks: int
    num_backed_blocks: int
    num_restorable_tokens: int
    next_copy: BlockKey | None
    is_arriving: bool
    watched: list[BlockKey]


class ContentWatch:
    """Keeps one ``Found`` per sequence, and drops it when a content that it depends on changes."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._changes = [ChangeReader(state.ledger.changed_keys), ChangeReader(state.backups.changed_keys)]
        self._found: dict[SeqId, Found] = {}
        self._watchers: dict[BlockKey, set[SeqId]] = {}

    def refresh(self, changed: Set[SeqId]) -> set[SeqId]:
        """Drop every result that may have changed since the last call; return the ids of their sequences.

        Args:
            changed: Sequences that have changed themselves.
        """
        stale = {seq_id for seq_id in changed if seq_id in self._found}
        watchers = self._watchers
        for changes in self._changes:
            for key in changes.take(watchers):
                if key in watchers:
                    stale |= watchers[key]
        for seq_id in stale:
            self._forget(seq_id)
        return stale

    def keep_only(self, seq_ids: Set[SeqId]) -> Set[SeqId]:
        """Keep results of these sequences only; return the ids of those whose results were dropped."""
        gone = self._found.keys() - seq_ids
        for seq_id in gone:
            self._forget(seq_id)
        return gone

    def find(self, seq: Sequence) -> Found:
        """What can be restored of a sequence: at most all tokens but one, which is left to compute."""
        found = self._found.get(seq.seq_id)
        if found is None:
            found = self._found[seq.seq_id] = self._look_up(seq)
            for key in found.watched:
                self._watchers.setdefault(key, set()).add(seq.seq_id)
        return found

    def _forget(self, seq_id: SeqId) -> None:
        for key in self._found.pop(seq_id).watched:
            watchers = self._watchers[key]
            watchers.remove(seq_id)
            if not watchers:
                del self._watchers[key]

    def _look_up(self, seq: Sequence) -> Found:
        """Look up a sequence: leading hits first, on a fast path, since most sequences have nothing else."""
        ledger, block_tokens = self._state.ledger, self._state.ledger.block_tokens
        keys = seq.keys_for((len(seq.tokens) - 1) // block_tokens, block_tokens)
        hits = ledger.find_prefix(keys)
        num_shared = num_shared_hits = len(hits) - ledger.count_cached(hits)
        num_device, num_backed = len(hits), 0
        next_copy: Backup | None = None
        for key in keys[len(hits) :]:
            block = ledger.find(key)
            if block is not None:
                num_device += 1
                num_shared += ledger.state(block) is not BlockState.CACHED
            elif (backup := self._state.backups.find_whole(key)) is not None:
                num_backed += 1
                next_copy = next_copy or backup
            else:
                break
        num_full = num_device + num_backed
        num_tokens = num_full * block_tokens
        if seq.tail is not None and seq.tail[0].is_whole and seq.tail[1] // block_tokens == num_full:
            num_backed, num_tokens = num_backed + 1, seq.tail[1]
        return Found(
            num_hit_blocks=len(hits),
            num_shared_hits=num_shared_hits,
            num_device_blocks=num_device,
            num_shared_blocks=num_shared,
            num_backed_blocks=num_backed,
            num_restorable_tokens=num_tokens,
            next_copy=None if next_copy is None else next_copy.key,
            is_arriving=next_copy is not None and next_copy.num_readers > 0,
            watched=keys[: num_full + 1],
        )
