"""Tracks which blocks of vLLM's requests have a copy in swap space, and which copies are under way.

vLLM reuses the blocks of a preempted request at once. So an outbound copy holds its blocks, as a request would, and
frees them when it has ended: no step waits for it, and no block is overwritten before it was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.core.transfers import TransferLedger
from floodplain.plugins.vllm.tracked import TrackedRequest


class Holder(Protocol):
    """Keeps blocks from being reused; vLLM's block pool does."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each of these blocks."""

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Drop a reference to each."""


@dataclass(slots=True)
class Copy:
    """What the books keep with a transfer in flight.

    Attributes:
        tracked: The request.
        blocks: vLLM's objects.
        is_holding: The copy holds its blocks by references of its own.
        is_void: The KV that it copies is invalid by now.
    """

    tracked: TrackedRequest
    blocks: tuple[Any, ...]
    is_holding: bool
    is_void: bool = False

    @property
    def held(self) -> tuple[Any, ...]:
        """Return the blocks that it holds."""
        return self.blocks if self.is_holding else ()


class SwapBooks:
    """Owns the slots of swap space, and the backups of each request in them.

    Args:
        slots: Of each tier, the nearest first.
        block_tokens: Tokens of a block.

    Attributes:
        backups: All copies, each of one request alone.
        transfers: Copies under way.
    """

    def __init__(self, slots: Iterable[SlotLedger], block_tokens: int) -> None:
        self.backups = BackupTable(slots, retains=False)
        self.transfers: TransferLedger[Copy] = TransferLedger(self.backups)
        self.num_resumed = self.num_refused = 0
        self._block_tokens = block_tokens
        self._holder: Holder | None = None
        self._serials = count()
        self._owner: dict[Backup, TrackedRequest] = {}  # of kept backups
        self._due: list[Transfer] = []
        self._owners: dict[int, str] = {}

    def bind(self, holder: Holder) -> None:
        """Hold the blocks of copies in ``holder`` from now on."""
        self._holder = holder

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> list[Any]:
        """Return blocks that copies hold, once for each of those copies."""
        return [block for move in self.transfers for block in move.cargo.held]

    @property
    def num_draining_blocks(self) -> int:
        """Return the number of blocks that only copies still hold."""
        return self.count_draining()

    def count_draining(self, deferred: Sequence[Any] = ()) -> int:
        """Return the number of blocks that only copies and outstanding steps still hold.

        Args:
            deferred: Blocks held by outstanding steps, once for each hold.
        """
        holds = [*self.held_blocks, *deferred]
        held = {block.block_id: block for block in holds}
        num_holds = Counter(block.block_id for block in holds)
        return sum(block.ref_cnt == num_holds[block_id] for block_id, block in held.items())

    def count_restorable(self, tracked: TrackedRequest) -> int:
        """Return how many leading tokens can be restored without computing."""
        num_whole = next((i for i, backup in enumerate(tracked.backups) if not backup.is_whole), len(tracked.backups))
        if num_whole == len(tracked.backups) and tracked.tail is not None and tracked.tail[0].is_whole:
            return tracked.tail[1]
        return num_whole * self._block_tokens

    # -- out -------------------------------------------------------------------------------------------------------

    def back_up(self, tracked: TrackedRequest, blocks: Sequence[Any], num_computed: int, most: int, tier: Tier) -> None:
        """Start backups of up to ``most`` more of a request's full blocks, as many as ``tier`` has slots for.

        Args:
            tracked: The request.
            blocks: Its block table, vLLM's objects.
            num_computed: Leading tokens that have KV there.
            most: Blocks.
            tier: The target.
        """
        first = len(tracked.backups)
        wanted = min(most, num_computed // self._block_tokens - first, self.backups.num_available(tier))
        if wanted > 0:
            tracked.backups += self._write(tracked, TransferKind.BACKUP, blocks[first : first + wanted], tier, None)

    def swap_out(
        self,
        tracked: TrackedRequest,
        blocks: Sequence[Any],
        num_computed: int,
        reason: Reason,
        tier: Tier | None = None,
    ) -> bool:
        """Swap out a request: copy blocks without a backup to ``tier`` (None: nearest), or elsewhere if it is full.

        Returns:
            False, and nothing is kept of it, if there is no room, or nothing to keep.
        """
        first, num_blocks = len(tracked.backups), -(-num_computed // self._block_tokens)
        if not num_computed or num_blocks - first > sum(map(self.backups.num_available, self.backups.slots)):
            self.num_refused += num_computed > 0
            self.forget(tracked)
            return False
        if num_blocks > first:
            nearest = next(iter(self.backups.slots))
            backups = self._write(tracked, TransferKind.SWAP_OUT, blocks[first:num_blocks], tier or nearest, reason)
            if num_computed % self._block_tokens:
                tracked.tail = (backups.pop(), num_computed)
            tracked.backups += backups
        tracked.is_away = True
        return True

    def _write(
        self, tracked: TrackedRequest, kind: TransferKind, blocks: Sequence[Any], tier: Tier, reason: Reason | None
    ) -> list[Backup]:
        assert self._holder is not None, "books are bound before blocks are allocated"
        keys = [BlockKey(b"%d:%d" % (tracked.seq_id, next(self._serials))) for _ in blocks]
        backups = self.backups.begin_write_from(tier, keys)
        assert backups is not None, "the caller has counted the slots"
        for backup in backups:
            backup.is_private = True
            self.backups.keep(backup)
            self._owner[backup] = tracked
        self._holder.touch(blocks)
        tracked.num_leaving += len(blocks)
        self._begin(kind, backups, Copy(tracked, tuple(blocks), is_holding=True), reason)
        return backups

    # -- back ------------------------------------------------------------------------------------------------------

    def fetch(self, tracked: TrackedRequest, blocks: Sequence[Any], num_local: int, num_tokens: int) -> None:
        """Start to restore tokens ``num_local`` (whole blocks) to ``num_tokens`` of a request into its blocks."""
        first, end = num_local // self._block_tokens, -(-num_tokens // self._block_tokens)
        copy = Copy(tracked, tuple(blocks[first:end]), is_holding=False)
        self._begin(TransferKind.SWAP_IN, tracked.known_backups[first:end], copy, Reason.SLICE_BEGINS)

    def note_start(self, tracked: TrackedRequest) -> None:
        """Record that a request runs again, and drop the copy of its tail: its next token would outdate that."""
        tracked.is_away = False
        self._release_tail(tracked)

    # -- slots that come and go (``runtime.relocations``) ------------------------------------------------------------

    def is_on_device(self, backup: Backup) -> bool:
        """Whether the device still has a backup's block: if its request is not swapped out, or if it has none."""
        owner = self._owner.get(backup)
        return owner is None or not owner.is_away

    def swapped_backups(self) -> Iterator[list[Backup]]:
        """Yield the backups of each swapped request, by order key."""
        away = {owner for owner in self._owner.values() if owner.is_away}
        for tracked in sorted(away, key=lambda one: one.order_key):
            yield tracked.known_backups

    def drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Drop lost backups, and those behind them, which are of no use alone."""
        for tracked in {self._owner[backup] for backup in lost if backup in self._owner}:
            self._drop_lost(tracked)

    # -- both ways -------------------------------------------------------------------------------------------------

    def forget(self, tracked: TrackedRequest) -> None:
        """Drop all backups of a request."""
        self.note_start(tracked)
        self._release_from(tracked, 0)

    def void_copies(self) -> None:
        """Void all copies under way; their requests must be forgotten, too.

        An outbound copy only reads: its blocks are free at once. An inbound copy still writes: it holds its blocks
        until it has ended, and its request must not wait for it.
        """
        assert self._holder is not None
        for move in self.transfers:
            copy = move.cargo
            if move.is_inbound and not copy.is_holding:
                self._holder.touch(copy.blocks)
            elif not move.is_inbound:
                self._holder.free_blocks(tuple(reversed(copy.held)))
            copy.is_holding, copy.is_void = move.is_inbound, True

    def find_owner(self, arrival: str) -> str | None:
        """Return vLLM's name of the request of an inbound copy, by the copy's name from ``take_owners``.

        None if the request does not wait for it any more.
        """
        copy = self.transfers[int(arrival)].cargo
        return None if copy.is_void else copy.tracked.request.request_id

    def take_due(self) -> list[Transfer]:
        """Return copies to begin with the next step, once."""
        due, self._due = self._due, []
        return due

    def take_owners(self) -> dict[int, str]:
        """Return names of the inbound copies in ``take_due``, under which workers report their end to vLLM.

        They are not those of the requests: after a reset a request may wait for its second copy while its first runs.
        """
        owners, self._owners = self._owners, {}
        return owners

    def settle(self, transfer_id: int, lost: frozenset[int]) -> None:
        """Finish a copy; blocks at the places ``lost`` did not arrive whole."""
        assert self._holder is not None
        move, missing = self.transfers.end(transfer_id, sorted(lost))
        copy = move.cargo
        self._holder.free_blocks(tuple(reversed(copy.held)))  # the last first, as vLLM does: the first are worth more
        if move.is_inbound:
            self.num_resumed += not lost and not copy.is_void
        else:
            copy.tracked.num_leaving -= len(copy.blocks)
        if missing:
            self._drop_lost(copy.tracked)
        self.backups.changed_keys.trim()

    def _drop_lost(self, tracked: TrackedRequest) -> None:
        """Release a request's backups from the first lost one on: what follows a lost block is of no use."""
        num_kept = next((i for i, backup in enumerate(tracked.backups) if backup.is_lost), len(tracked.backups))
        is_short = num_kept < len(tracked.backups)
        self._release_from(tracked, num_kept)
        if is_short or (tracked.tail is not None and tracked.tail[0].is_lost):
            self._release_tail(tracked)

    def _release_from(self, tracked: TrackedRequest, num_kept: int) -> None:
        for backup in tracked.backups[num_kept:]:
            self._release(backup)
        del tracked.backups[num_kept:]

    def _release_tail(self, tracked: TrackedRequest) -> None:
        if tracked.tail is not None:
            self._release(tracked.tail[0])
            tracked.tail = None

    def _release(self, backup: Backup) -> None:
        del self._owner[backup]
        self.backups.release(backup)

    def _begin(self, kind: TransferKind, backups: Sequence[Backup], copy: Copy, reason: Reason | None) -> None:
        ids = [BlockId(block.block_id) for block in copy.blocks]
        transfer = self.transfers.begin(kind, copy.tracked.seq_id, ids, backups, reason, copy)
        if kind is TransferKind.SWAP_IN:
            self._owners[transfer.transfer_id] = str(transfer.transfer_id)
        self._due.append(transfer)
