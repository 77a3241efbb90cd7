"""Which blocks of vLLM's requests have a copy in swap space, and which copies are under way.

vLLM gives the blocks of whoever it preempts to others at once. So a copy on its way out holds its blocks, as a request
would, and lets them go when it has ended: nobody waits for it, and nothing is overwritten before it was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.plugins.vllm.tracked import TrackedRequest


class Holder(Protocol):
    """Keeps blocks from being given to others; vLLM's block pool does."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more user of these blocks."""

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """One less."""


@dataclass(frozen=True, slots=True)
class _Copy:
    tracked: TrackedRequest
    is_inbound: bool
    backups: tuple[Backup, ...]
    held: tuple[Any, ...]


class SwapBooks:
    """Owner of the slots of swap space.

    Args:
        num_slots: Blocks that HOST takes.
        block_tokens: Tokens of a block.
    """

    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.table = BackupTable([SlotLedger(Tier.HOST, num_slots)], retains=False)
        self.num_resumed = self.num_refused = 0
        self._block_tokens = block_tokens
        self._holder: Holder | None = None
        self._ids = count()
        self._serials = count()
        self._copies: dict[int, _Copy] = {}
        self._due: list[Transfer] = []
        self._owners: dict[int, str] = {}

    def bind(self, holder: Holder) -> None:
        """Blocks are held there from now on."""
        self._holder = holder

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._copies)

    @property
    def num_outbound_blocks(self) -> int:
        """Blocks on their way out."""
        return sum(len(copy.backups) for copy in self._copies.values() if not copy.is_inbound)

    @property
    def num_inbound_blocks(self) -> int:
        """Blocks on their way back."""
        return sum(len(copy.backups) for copy in self._copies.values() if copy.is_inbound)

    @property
    def num_draining_blocks(self) -> int:
        """Blocks that only copies still hold."""
        num_holds = Counter(block.block_id for copy in self._copies.values() for block in copy.held)
        held = {block.block_id: block for copy in self._copies.values() for block in copy.held}
        return sum(block.ref_cnt == num_holds[block_id] for block_id, block in held.items())

    def count_restorable(self, tracked: TrackedRequest) -> int:
        """Leading tokens that come back without computing."""
        num_whole = next((i for i, backup in enumerate(tracked.backups) if not backup.is_whole), len(tracked.backups))
        if num_whole == len(tracked.backups) and tracked.tail is not None and tracked.tail[0].is_whole:
            return tracked.tail[1]
        return num_whole * self._block_tokens

    # -- out -------------------------------------------------------------------------------------------------------

    def back_up(self, tracked: TrackedRequest, blocks: Sequence[Any], num_computed: int, most: int) -> None:
        """Begin to write up to ``most`` more of its full blocks behind; as many as there are slots for.

        Args:
            tracked: Whose.
            blocks: Its block table, vLLM's objects.
            num_computed: Leading tokens that have KV there.
            most: Blocks.
        """
        first = len(tracked.backups)
        wanted = min(most, num_computed // self._block_tokens - first, self.table.num_available(Tier.HOST))
        if wanted > 0:
            tracked.backups += self._write(tracked, TransferKind.BACKUP, blocks[first : first + wanted], None)

    def swap_out(self, tracked: TrackedRequest, blocks: Sequence[Any], num_computed: int, reason: Reason) -> bool:
        """It leaves the device: begin to write what has no copy yet.

        Returns:
            False, and nothing is kept of it, if that finds no room, or there is nothing to keep.
        """
        first, num_blocks = len(tracked.backups), -(-num_computed // self._block_tokens)
        if not num_computed or num_blocks - first > self.table.num_available(Tier.HOST):
            self.num_refused += num_computed > 0
            self.forget(tracked)
            return False
        if num_blocks > first:
            backups = self._write(tracked, TransferKind.SWAP_OUT, blocks[first:num_blocks], reason)
            if num_computed % self._block_tokens:
                tracked.tail = (backups.pop(), num_computed)
            tracked.backups += backups
        return True

    def _write(
        self, tracked: TrackedRequest, kind: TransferKind, blocks: Sequence[Any], reason: Reason | None
    ) -> list[Backup]:
        assert self._holder is not None, "books are bound before blocks are given to anybody"
        keys = [BlockKey(b"%d:%d" % (tracked.seq_id, next(self._serials))) for _ in blocks]
        backups = self.table.begin_write(Tier.HOST, keys)
        assert backups is not None, "the caller has counted the slots"
        for backup in backups:
            backup.is_private = True
            self.table.keep(backup)
        self._holder.touch(blocks)
        tracked.num_leaving += len(blocks)
        self._begin(kind, _Copy(tracked, False, tuple(backups), tuple(blocks)), blocks, reason)
        return backups

    # -- back ------------------------------------------------------------------------------------------------------

    def fetch(self, tracked: TrackedRequest, blocks: Sequence[Any], num_local: int, num_tokens: int) -> None:
        """Begin to restore its tokens from ``num_local``, whole blocks, to ``num_tokens`` into its block table."""
        first, end = num_local // self._block_tokens, -(-num_tokens // self._block_tokens)
        known = [*tracked.backups, *([tracked.tail[0]] if tracked.tail is not None else ())]
        backups = tuple(known[first:end])
        self.table.begin_read(backups)
        self._begin(TransferKind.SWAP_IN, _Copy(tracked, True, backups, ()), blocks[first:end], Reason.SLICE_BEGINS)

    def note_start(self, tracked: TrackedRequest) -> None:
        """It runs again: the copy of its last block will be out of date with its next token."""
        if tracked.tail is not None:
            self.table.release(tracked.tail[0])
            tracked.tail = None

    # -- both ways -------------------------------------------------------------------------------------------------

    def forget(self, tracked: TrackedRequest) -> None:
        """Keep nothing of it any more."""
        self.note_start(tracked)
        for backup in tracked.backups:
            self.table.release(backup)
        tracked.backups = []

    def take_due(self) -> list[Transfer]:
        """Copies to begin with the next step."""
        due, self._due = self._due, []
        return due

    def take_owners(self) -> dict[int, str]:
        """vLLM's name of the request that each copy back is for, of those that ``take_due`` gave."""
        owners, self._owners = self._owners, {}
        return owners

    def settle(self, transfer_id: int, ok: bool) -> None:
        """A copy has ended, well or not."""
        copy = self._copies.pop(transfer_id)
        if copy.is_inbound:
            self._settle_inbound(copy, ok)
            return
        assert self._holder is not None
        self._holder.free_blocks(tuple(reversed(copy.held)))  # the last first, as vLLM does: the first are worth more
        copy.tracked.num_leaving -= len(copy.backups)
        if ok:
            self.table.commit_write(copy.backups)
        else:
            self.table.abort_write(copy.backups)
            self._drop_lost(copy.tracked)

    def _settle_inbound(self, copy: _Copy, ok: bool) -> None:
        self.num_resumed += ok
        if not ok:
            for backup in copy.backups:
                self.table.lose(backup)
        self.table.finish_read(copy.backups)
        if not ok:
            self._drop_lost(copy.tracked)

    def _drop_lost(self, tracked: TrackedRequest) -> None:
        """What follows a block that is lost is of no use."""
        num_kept = next((i for i, backup in enumerate(tracked.backups) if backup.is_lost), len(tracked.backups))
        is_short = num_kept < len(tracked.backups)
        for backup in tracked.backups[num_kept:]:
            self.table.release(backup)
        del tracked.backups[num_kept:]
        if tracked.tail is not None and (is_short or tracked.tail[0].is_lost):
            self.note_start(tracked)

    def _begin(self, kind: TransferKind, copy: _Copy, blocks: Sequence[Any], reason: Reason | None) -> None:
        transfer_id = next(self._ids)
        self._copies[transfer_id] = copy
        if copy.is_inbound:
            self._owners[transfer_id] = copy.tracked.request.request_id
        locations = tuple(backup.location for backup in copy.backups)
        ids = tuple(BlockId(block.block_id) for block in blocks)
        self._due.append(Transfer(transfer_id, kind, copy.tracked.seq_id, ids, locations, reason))
