"""Tracks which blocks of vLLM's requests have a copy in swap space, and which copies are under way.

vLLM reuses the blocks of a preempted request at once. So an outbound copy holds its blocks, as a request would, and
frees them when it has ended: no step waits for it, and no block is overwritten before it was read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.core.transfers import TransferLedger
from floodplain.plugins.vllm.messages import COPY
from floodplain.plugins.vllm.saved_prefixes import SavedPrefixes
from floodplain.plugins.vllm.tracked import TrackedRequest

SAVED_TOGETHER = 64
"""Blocks of an ended request that one copy takes."""


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


Tables = Sequence[Sequence[Any]]
"""A request's block table in each group of layers, vLLM's objects."""


def first_kept(table: Sequence[Any]) -> int:
    """Return the first place of a block table that has a block: before a window, vLLM has its null block."""
    return bisect_left(table, True, key=lambda block: not block.is_null)


def count_kept(group: CacheGroup, table: Sequence[Any]) -> int:
    """Return how many blocks a table has. One of states has null blocks between others, too."""
    if group.kind is CacheKind.STATE:
        return sum([not block.is_null for block in table])
    return len(table) - first_kept(table)


class SwapBooks:
    """Owns the slots of swap space, and the backups of each request in them.

    A request has a block table in each group of layers. What full attention keeps never changes, so it is backed up
    ahead, and a part of it can be restored. The rest (last blocks that are partly filled, windows, states) is copied
    when the request is swapped out, and is restored whole or not at all.

    Args:
        slots: Of each tier, the nearest first.
        by_content: Copies of full blocks are found by their content, serve all requests with it, and stay when these
            have ended, until their slots are needed. All layers must be in one group of full attention.

    Attributes:
        backups: All copies; without ``by_content`` each of one request alone.
        saved: Finds copies by content; None without ``by_content``.
        num_adopted_tokens: Tokens that copies of other requests restored, ``adopt``.
    """

    def __init__(self, slots: Iterable[SlotLedger], groups: Sequence[CacheGroup], *, by_content: bool = False) -> None:
        self.backups = BackupTable(slots, retains=by_content)
        self.saved = SavedPrefixes(self.backups) if by_content else None
        self.transfers: TransferLedger[Copy] = TransferLedger(self.backups)
        self.num_resumed = self.num_refused = self.num_adopted_tokens = 0
        self._groups = tuple(groups)
        full = [number for number, group in enumerate(groups) if group.kind is CacheKind.FULL]
        self._block_tokens = groups[full[0]].block_tokens if full else 1
        self._full = [number for number in full if groups[number].block_tokens == self._block_tokens]
        self._has_state = any(group.kind is CacheKind.STATE for group in groups)
        self._holder: Holder | None = None
        self._serials = count()
        self._owners: dict[Backup, list[TrackedRequest]] = {}  # of kept backups
        self._due: list[Transfer] = []

    def bind(self, holder: Holder) -> None:
        """Hold the blocks of copies in ``holder`` from now on."""
        self._holder = holder

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> list[Any]:
        """Return blocks that copies hold, once for each of those copies."""
        return [block for move in self.transfers for block in move.cargo.held]

    @property
    def fetching(self) -> set[str]:
        """Return vLLM's names of requests that wait for inbound copies, or ended while they did."""
        moves = [move for move in self.transfers if move.is_inbound and not move.cargo.is_void]
        return {move.cargo.tracked.request.request_id for move in moves}

    @property
    def num_draining_blocks(self) -> int:
        """Return the number of blocks that only copies still hold."""
        return self.count_draining()

    def count_draining(self, deferred: Sequence[Any] = ()) -> int:
        """Return the number of blocks that only copies and outstanding steps (``deferred``, each hold) still hold."""
        holds = [*self.held_blocks, *deferred]
        held = {block.block_id: block for block in holds}
        num_holds = Counter(block.block_id for block in holds)
        return sum(block.ref_cnt == num_holds[block_id] for block_id, block in held.items())

    def count_restorable(self, tracked: TrackedRequest, most: int | None = None) -> int:
        """Return how many leading tokens, ``most`` at most, can be restored without computing."""
        num_whole = next((i for i, backup in enumerate(tracked.backups) if not backup.is_whole), len(tracked.backups))
        rest, has_all = tracked.rest, num_whole == len(tracked.backups)
        if rest and has_all and all(backup.is_whole for backup in rest.values()):
            is_short = most is not None and most < tracked.num_kept_tokens
            num_tokens = tracked.num_kept_tokens if not is_short else 0 if self._has_state else most or 0
        elif len(self._full) < len(self._groups):
            num_tokens = 0
        else:
            num_tokens = num_whole // len(self._full) * self._block_tokens
        return num_tokens if most is None else min(num_tokens, most)

    def count_reads(self, tracked: TrackedRequest, num_local: int, num_tokens: int) -> int:
        """Return how many blocks a copy of tokens ``num_local`` (whole blocks) to ``num_tokens`` would read."""
        has_rest = num_tokens >= tracked.num_kept_tokens or len(self._full) < len(self._groups)
        num_full = min(len(tracked.backups), -(-num_tokens // self._block_tokens) * len(self._full))
        return max(0, num_full + has_rest * len(tracked.rest) - self._count_full(num_local))

    # -- out -------------------------------------------------------------------------------------------------------

    def back_up(self, tracked: TrackedRequest, tables: Tables, num_computed: int, most: int, tier: Tier) -> None:
        """Start backups of up to ``most`` more full blocks of a request, as many as ``tier`` has slots for.

        Pinned contents are not evicted for them. ``tables`` has its block table in each group, vLLM's objects;
        ``num_computed`` leading tokens have KV there.
        """
        first = len(tracked.backups)
        room = min(self.backups.num_available(tier), self.backups.num_unpinned)
        wanted = min(most, self._count_full(num_computed) - first, room)
        if wanted > 0:
            blocks = self._full_blocks(tables, first, first + wanted)
            keys = self._keys_of(tracked, first, first + wanted)
            tracked.backups += self._write(tracked, TransferKind.BACKUP, blocks, keys, tier, None)

    def swap_out(
        self,
        tracked: TrackedRequest,
        tables: Tables,
        num_computed: int,
        reason: Reason,
        tier: Tier | None = None,
    ) -> bool:
        """Swap out a request: copy blocks without a backup to ``tier`` (None: nearest), or elsewhere if it is full.

        False, and nothing is kept of it, if there is no room, or nothing to keep.
        """
        first = len(tracked.backups)  # more than it has, if it lost its KV and computes again
        num_full = max(first, self._count_full(num_computed))
        places = self._rest_of(tracked, tables, num_computed)
        blocks = [*self._full_blocks(tables, first, num_full), *(tables[group][place] for group, place in places)]
        if not num_computed or len(blocks) > sum(map(self.backups.num_available, self.backups.slots)):
            self.num_refused += num_computed > 0
            self.forget(tracked)
            return False
        if blocks:
            nearest = next(iter(self.backups.slots))
            keys = [*self._keys_of(tracked, first, num_full), *[None for _ in places]]
            backups = self._write(tracked, TransferKind.SWAP_OUT, blocks, keys, tier or nearest, reason)
            tracked.backups += backups[: num_full - first]
            tracked.rest = dict(zip(places, backups[num_full - first :], strict=True))
        tracked.num_kept_tokens = num_computed
        tracked.is_away = True
        return True

    def _count_full(self, num_computed: int) -> int:
        return num_computed // self._block_tokens * len(self._full)

    def _full_blocks(self, tables: Tables, first: int, end: int) -> list[Any]:
        """Return blocks ``first`` to ``end`` of full attention: the first of each group, then the second, and so on."""
        num_groups = len(self._full)
        return [tables[self._full[index % num_groups]][index // num_groups] for index in range(first, end)]

    def _rest_of(self, tracked: TrackedRequest, tables: Tables, num_computed: int) -> list[tuple[int, int]]:
        """Return (group, place in its table) of all other blocks that hold something of ``num_computed`` tokens."""
        places = []
        for number, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            if number in self._full:
                num_backed = -(-(len(tracked.backups) - self._full.index(number)) // len(self._full))
                first = max(num_computed // self._block_tokens, num_backed)
            else:
                first = self._first_place(number, table, num_computed)
            places += [(number, place) for place in range(first, -(-num_computed // group.block_tokens))]
        return places

    def _keys_of(self, tracked: TrackedRequest, first: int, end: int) -> list[BlockKey | None]:
        """Return the keys of full blocks ``first`` to ``end``: their contents; None without ``by_content``, or yet."""
        known = tracked.request.block_hashes[first:end] if self.saved is not None else []
        return [*known, *[None for _ in range(end - first - len(known))]]

    def _write(
        self,
        tracked: TrackedRequest,
        kind: TransferKind,
        blocks: Sequence[Any],
        keys: Sequence[BlockKey | None],
        tier: Tier,
        reason: Reason | None,
    ) -> list[Backup]:
        """Keep a backup of each block for a request; return them. A content without a whole one is copied."""
        found = [None if key is None else self.backups.find_whole(key) for key in keys]
        for backup in found:
            if backup is not None:
                self._keep(tracked, backup)
        missing = [place for place, backup in enumerate(found) if backup is None]
        written = self._begin_backups(tracked, [keys[place] for place in missing], tier)
        if written:
            self._copy_out(tracked, kind, written, [blocks[place] for place in missing], reason)
        new = iter(written)
        return [next(new) if backup is None else backup for backup in found]

    def _begin_backups(self, tracked: TrackedRequest, keys: Sequence[BlockKey | None], tier: Tier) -> list[Backup]:
        """Allocate slots; a content that another copy is being made of, or that is no key, gets a key of its own."""
        backups = self.backups.begin_write_from(tier, [self._name(tracked, key) for key in keys])
        assert backups is not None, "the caller has counted the slots"
        for backup, key in zip(backups, keys, strict=True):
            backup.is_private = backup.key != key
            self._keep(tracked, backup)
        return backups

    def _name(self, tracked: TrackedRequest, key: BlockKey | None) -> BlockKey:
        if key is not None and self.backups.find(key) is None:
            return key
        return BlockKey(b"%d:%d" % (tracked.seq_id, next(self._serials)))

    def _copy_out(
        self,
        tracked: TrackedRequest,
        kind: TransferKind,
        backups: Sequence[Backup],
        blocks: Sequence[Any],
        reason: Reason | None,
    ) -> None:
        assert self._holder is not None, "books are bound before blocks are allocated"
        self._holder.touch(blocks)
        tracked.num_leaving += len(blocks)
        self._begin(kind, backups, Copy(tracked, tuple(blocks), is_holding=True), reason)

    # -- by content ------------------------------------------------------------------------------------------------

    def save(self, tracked: TrackedRequest, table: Sequence[Any], pin: Pin) -> None:
        """Start to copy the contents of an ended request's pin that have no copy, the first ones first.

        Only slots of cheaper pins are taken, and copying ends where there are none. A piece's blocks are free when the
        piece has ended. ``table`` has the request's blocks, ``pin`` is of its leading full ones.
        """
        unsaved = [place for place, key in enumerate(pin.keys) if self.backups.find(key) is None]
        for first in range(0, len(unsaved), SAVED_TOGETHER):
            places = unsaved[first : first + SAVED_TOGETHER]
            keys = [pin.keys[place] for place in places]
            written = (self.backups.begin_write(tier, keys, below=pin.worth) for tier in self.backups.slots)
            backups = next((found for found in written if found is not None), None)
            if backups is None:
                return
            self._copy_out(tracked, TransferKind.BACKUP, backups, [table[place] for place in places], None)

    def count_saved(self, tracked: TrackedRequest, most: int) -> int:
        """Return how many leading blocks, ``most`` at most, a request without copies of its own finds by content."""
        if self.saved is None or tracked.has_kv or tracked.request.skip_reading_prefix_cache:
            return 0
        return self.saved.count(tracked.seq_id, tracked.request.block_hashes, most)

    def take_changed(self) -> set[SeqId]:
        """Return requests whose ``count_saved`` may have changed since the last call; it is up to date from now on."""
        return set() if self.saved is None else self.saved.refresh()

    def watch_only(self, absent: Set[SeqId]) -> None:
        """Keep answers of ``count_saved`` for these requests only."""
        if self.saved is not None:
            self.saved.keep_only(absent)

    def adopt(self, tracked: TrackedRequest) -> None:
        """Keep what ``count_saved`` finds for a request, as copies of its own: it can be restored."""
        if self.saved is not None and not tracked.has_kv:
            most = (tracked.request.num_tokens - 1) // self._block_tokens
            for backup in self.saved.find(tracked.request.block_hashes[:most]):
                self._keep(tracked, backup)
                tracked.backups.append(backup)

    def lose_contents(self) -> None:
        """Lose all copies, whose requests are forgotten: the model that computed them has changed."""
        for tier, slots in self.backups.slots.items():
            for backup in self.backups.in_slots(tier, slots.taken):
                self.backups.lose(backup)

    # -- back ------------------------------------------------------------------------------------------------------

    def fetch(self, tracked: TrackedRequest, tables: Tables, num_local: int, num_tokens: int) -> None:
        """Start to restore tokens ``num_local`` (whole blocks) to ``num_tokens`` of a request into its blocks."""
        assert all(num_local % group.block_tokens == 0 for group in self._groups if group.kind is not CacheKind.STATE)
        blocks, backups = [], []
        for number, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            first = max(num_local // group.block_tokens, self._first_place(number, table, num_tokens))
            for place in range(first, -(-num_tokens // group.block_tokens)):
                blocks.append(table[place])
                backups.append(self._backup_of(tracked, number, place))
        self.num_adopted_tokens += 0 if tracked.is_away else num_tokens - num_local
        reason = Reason.SLICE_BEGINS if tracked.is_away else Reason.PREFIX_IN_SWAP
        self._begin(TransferKind.SWAP_IN, backups, Copy(tracked, tuple(blocks), is_holding=False), reason)

    def _first_place(self, number: int, table: Sequence[Any], num_tokens: int) -> int:
        """Return the first place of a group's table that holds something for the token behind ``num_tokens``."""
        group = self._groups[number]
        return first_kept(table) if group.kind is not CacheKind.STATE else (num_tokens - 1) // group.block_tokens

    def _backup_of(self, tracked: TrackedRequest, group: int, place: int) -> Backup:
        index = place * len(self._full) + self._full.index(group) if group in self._full else len(tracked.backups)
        return tracked.backups[index] if index < len(tracked.backups) else tracked.rest[group, place]

    def note_start(self, tracked: TrackedRequest) -> None:
        """Record that a request runs again, and drop the copies that its next token would outdate."""
        tracked.is_away = False
        self._release_rest(tracked)

    def cut(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Drop the backups of a request behind its first ``num_tokens``: other tokens will follow these."""
        if not tracked.is_away or num_tokens < tracked.num_kept_tokens:
            self._release_rest(tracked)
        self._release_from(tracked, self._count_full(num_tokens))  # may be more than it had computed again

    # -- slots that come and go (``runtime.relocations``) ------------------------------------------------------------

    def is_on_device(self, backup: Backup) -> bool:
        """Whether the device still has a backup's block: if no request that keeps it is swapped out."""
        return not any(owner.is_away for owner in self._owners.get(backup, ()))

    def swapped_backups(self) -> Iterator[list[Backup]]:
        """Yield the backups of each swapped request, by order key."""
        away = {owner for owners in self._owners.values() for owner in owners if owner.is_away}
        for tracked in sorted(away, key=lambda one: one.order_key):
            yield tracked.known_backups

    def drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Drop lost backups, and those behind them, which are of no use alone."""
        for tracked in {owner for backup in lost for owner in self._owners.get(backup, ())}:
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
        """Return vLLM's name of the request of an inbound copy, by the copy's name (``messages.COPY``).

        None if the request does not wait for it any more. Other connectors report requests, which are returned.
        """
        if not arrival.startswith(COPY):
            return arrival
        copy = self.transfers[int(arrival.removeprefix(COPY))].cargo
        return None if copy.is_void else copy.tracked.request.request_id

    def take_due(self) -> list[Transfer]:
        """Return copies to begin with the next step, once."""
        due, self._due = self._due, []
        return due

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
        self.drop_lost(missing)
        if missing and move.is_inbound and not copy.is_void and not copy.tracked.is_away:
            self.forget(copy.tracked)  # it waits again, and may find a shorter beginning by content
        self.backups.changed_keys.trim()

    def _drop_lost(self, tracked: TrackedRequest) -> None:
        """Release a request's backups from the first lost one on: what follows a lost block is of no use."""
        num_kept = next((i for i, backup in enumerate(tracked.backups) if backup.is_lost), len(tracked.backups))
        is_short = num_kept < len(tracked.backups)
        self._release_from(tracked, num_kept)
        if is_short or any(backup.is_lost for backup in tracked.rest.values()):
            self._release_rest(tracked)

    def _release_from(self, tracked: TrackedRequest, num_kept: int) -> None:
        for backup in reversed(tracked.backups[num_kept:]):  # of a prefix, the last block is evicted first
            self._release(tracked, backup)
        del tracked.backups[num_kept:]

    def _release_rest(self, tracked: TrackedRequest) -> None:
        for backup in tracked.rest.values():
            self._release(tracked, backup)
        tracked.rest = {}

    def _keep(self, tracked: TrackedRequest, backup: Backup) -> None:
        self.backups.keep(backup)
        self._owners.setdefault(backup, []).append(tracked)

    def _release(self, tracked: TrackedRequest, backup: Backup) -> None:
        owners = self._owners[backup]
        owners.remove(tracked)
        if not owners:
            del self._owners[backup]
        self.backups.release(backup)

    def _begin(self, kind: TransferKind, backups: Sequence[Backup], copy: Copy, reason: Reason | None) -> None:
        ids = [BlockId(block.block_id) for block in copy.blocks]
        self._due.append(self.transfers.begin(kind, copy.tracked.seq_id, ids, backups, reason, copy))
