"""The PEER tier of an engine: leases become slots; recalled and idle ones are emptied and returned.

All of it happens at iteration boundaries, except for the last resort: if a deadline comes before the step loop's next
boundary, another thread frees the memory. Its content is a miss then, and is computed again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from floodplain.core.tiers import Tier
from floodplain.leases.states import LeaseId
from floodplain.lending.membership import Membership
from floodplain.lending.requests import LOOK_S, LeaseRequests
from floodplain.memory.backend import Backend
from floodplain.memory.host.emulated_link import LinkPair
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.peer.memory import PeerMemory
from floodplain.memory.peer.slots import PeerSlots, SlotMover, SlotStore
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.transfer import BlockStore, CopyEngine
from floodplain.runtime.relocations import Relocations

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2
BLOCKS_PER_RELOCATION = 16
"""A relocation shares the links with other copies: a small one delays nothing for long."""
MARGIN_S = 0.25
"""So long before a deadline the memory is freed even if not empty: a copy under way there must still end."""
CHUNK_BYTES = 32 * 2**20
"""About the size of a lease: a recall takes back no more than it must, and a chunk is quick to empty."""


@dataclass(frozen=True, slots=True)
class PeerParts:
    """Of one PEER tier: the memory of other devices, slots in it, and the started mover to and from the host's."""

    memory: PeerMemory
    slots: PeerSlots
    mover: SlotMover


def open_peer_parts(
    backend: Backend, pool: BlockStore, host: SwapSlots, num_bytes: int, links: LinkPair | None = None
) -> tuple[CopyEngine[Any], PeerParts]:
    """Open the PEER tier of an engine for at most ``num_bytes``, without memory; copies are paced by ``links``, if any.

    UserError if this process can borrow from none of the devices that it sees.
    """
    memory, slots = backend.open_peer_memory(), _make_slots(pool.layout, num_bytes)
    tier = backend.open_copies(pool, slots, None if links is None else links.peer)
    relocations = backend.open_copies(SlotStore(host), slots, links, BLOCKS_PER_RELOCATION)
    return tier, PeerParts(memory, slots, SlotMover(host, slots, relocations))


def _make_slots(layout: KVLayout, num_bytes: int) -> PeerSlots:
    """Rounded down to whole chunks, but at least one."""
    chunk_slots = max(1, CHUNK_BYTES // layout.block_bytes)
    return PeerSlots(layout, chunk_slots, max(1, num_bytes // (chunk_slots * layout.block_bytes)))


CHECKS_PER_IDLE = 8
"""Checks in the time after which a chunk is idle: each costs a walk over the taken slots."""
MOST_MORE = 4
"""The most chunks that are wanted beyond the present ones at a time."""


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """The use of a chunk at one moment: the copies that ever began there, and its slots with needed content."""

    num_copies: int
    num_kept: int


class IdleChunks:
    """Tracks the use of chunks; chooses which idle ones a borrower returns, and how many it wants. Pure.

    It wants ``max_chunks`` until one was idle. From then on it wants what it has, and more only if less than half a
    chunk's room is left. It returns a chunk, after ``idle_s`` seconds without use (0 keeps all), only if a whole
    chunk's room stays. So under constant use leases do not oscillate.
    """

    def __init__(self, idle_s: float, chunk_slots: int, max_chunks: int) -> None:
        self.num_wanted = max_chunks
        self._idle_s, self._chunk_slots, self._max_chunks = idle_s, chunk_slots, max_chunks
        self._used: dict[LeaseId, tuple[int, float]] = {}  # the copies at its last noticed use, and when that was
        self._next_check_s = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is time to check the chunks."""
        return self._idle_s > 0 and now >= self._next_check_s

    def choose(self, now: float, chunks: Mapping[LeaseId, ChunkUse], is_needed: bool) -> list[LeaseId]:
        """Return the leases of idle chunks to return now; all their slots can be given up at once.

        ``chunks`` are those that are not recalled, by lease: a chunk's number is used again, with other memory. If any
        request needs swap space (``is_needed``), room for one more chunk's slots stays.
        """
        self._next_check_s = now + self._idle_s / CHECKS_PER_IDLE
        self._note_uses(now, chunks)
        idle = [lease_id for lease_id in chunks if now - self._used[lease_id][1] >= self._idle_s]
        num_free = sum(self._chunk_slots - use.num_kept for use in chunks.values())
        num_spare = num_free // self._chunk_slots - is_needed
        returned = sorted(idle, key=lambda lease_id: self._used[lease_id][1])[: max(0, num_spare)]
        if returned:
            self.num_wanted = len(chunks) - len(returned)
        return returned

    def note_room(self, num_chunks: int, num_free: int, is_needed: bool) -> None:
        """Want more chunks if less than half a chunk's room is free in the present ones, and needed."""
        if is_needed and 2 * num_free < self._chunk_slots:
            more = max(1, min(num_chunks, MOST_MORE))
            self.num_wanted = max(self.num_wanted, min(self._max_chunks, num_chunks + more))

    def _note_uses(self, now: float, chunks: Mapping[LeaseId, ChunkUse]) -> None:
        before, self._used = self._used, {}
        for lease_id, use in chunks.items():
            num_copies, used_s = before.get(lease_id, (-1, now))
            is_used = bool(use.num_kept) or use.num_copies != num_copies
            self._used[lease_id] = use.num_copies, now if is_used else used_s


class PeerTier:
    """Borrows chunks of slots for swap space. The step loop calls ``at_boundary`` and ``close``, any thread ``hurry``.

    The slots of ``parts`` have no memory at first. Leases are polled every ``look_s`` seconds; a chunk that was not
    used for ``idle_s`` is returned (0 keeps all). ``siblings`` is that of ``LeaseRequests``.
    """

    def __init__(
        self,
        client: Membership,
        parts: PeerParts,
        relocations: Relocations,
        look_s: float = LOOK_S,
        idle_s: float = 0.0,
        siblings: list[LeaseRequests] | None = None,
    ) -> None:
        self._look_s = look_s
        self._client, self._slots, self._mover = client, parts.slots, parts.mover
        self._relocations, self._backups = relocations, relocations.backups
        self._idle = IdleChunks(idle_s, parts.slots.chunk_slots, parts.slots.max_chunks)
        self._next_look_s = float("-inf")
        self._requests = LeaseRequests(client, parts.memory, parts.slots.chunk_bytes, siblings)
        self.totals = self._requests.totals
        self._lock = threading.Lock()  # guards the next two, which ``hurry`` changes, too
        self._held: dict[LeaseId, int] = {}
        self._forced: list[int] = []
        self._leaving: set[LeaseId] = set()

    @property
    def is_leaving(self) -> bool:
        """Whether slots are being emptied, some at each poll."""
        return bool(self._leaving)

    def at_boundary(self, now: float) -> None:
        """Poll the leases if it is time: use granted ones, empty recalled ones. No step is outstanding."""
        if now >= self._next_look_s:
            self._next_look_s = now + self._look_s
            self.look()
            if self._idle.is_due(now):
                self._return_idle(now)

    def look(self) -> None:
        """Poll the leases, however short ago the last poll was."""
        for relocation_id, lost in self._mover.poll():
            self._relocations.settle(relocation_id, lost)
        self._bury_forced()
        self._leave()
        self._use_grants()
        self._ask()
        self._come_nearer()

    def hurry(self) -> float | None:
        """Free what is due, even if not empty; return seconds until the next deadline, None if nothing is recalled."""
        left_s = {lease_id: s for lease_id, s in self._client.to_free().items() if lease_id in self._held}
        for lease_id in [lease_id for lease_id, s in left_s.items() if s <= MARGIN_S]:
            del left_s[lease_id]
            self._force(lease_id)
        return min(left_s.values()) - MARGIN_S if left_s else None

    def close(self) -> None:
        """Return all leases."""
        self._mover.close()
        self._requests.cancel()
        with self._lock:
            held, self._held = self._held, {}
        for lease_id, chunk in held.items():
            self._slots.remove(chunk)
            self._client.freed(lease_id)

    # -- recalls -----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Empty recalled leases, the most urgent first; return those that are empty."""
        left_s = self._client.to_free()
        with self._lock:
            leaving = sorted(self._held.keys() & left_s.keys(), key=lambda i: (left_s[i], i))
            chunks = {lease_id: self._held[lease_id] for lease_id in leaving}
        for lease_id, chunk in chunks.items():
            slots = self._slots.slots_of(chunk)
            if lease_id not in self._leaving:
                self._leaving.add(lease_id)
                self._backups.retire_slots(Tier.PEER, slots)
            if left_s[lease_id] <= MARGIN_S:
                self._force(lease_id)
                self._bury_forced()
            elif self._evacuate(slots):
                self._give_back(lease_id)

    def _evacuate(self, slots: range) -> bool:
        """Begin to copy more slots to the host; True if none is taken any more."""
        while self._relocations.num_in_flight < MOST_IN_FLIGHT:
            relocation = self._relocations.evacuate(Tier.PEER, slots, Tier.HOST, BLOCKS_PER_RELOCATION)
            if relocation is None:
                break
            self._mover.submit(relocation)
        return not self._backups.slots[Tier.PEER].count_taken(slots)

    def _give_back(self, lease_id: LeaseId) -> None:
        with self._lock:
            chunk = self._held.pop(lease_id, None)
        if chunk is not None:
            self._slots.remove(chunk)
            self._client.freed(lease_id)
            self.totals.num_returned += 1
        self._leaving.discard(lease_id)

    def _return_idle(self, now: float) -> None:
        """Return chunks that are idle. Prefixes there that no request keeps are dropped."""
        with self._lock:
            held = {lease_id: chunk for lease_id, chunk in self._held.items() if lease_id not in self._leaving}
        num_kept = Counter(slot // self._slots.chunk_slots for slot in self._backups.kept_slots(Tier.PEER))
        uses = {lease_id: ChunkUse(self._slots.num_copies(chunk), num_kept[chunk]) for lease_id, chunk in held.items()}
        for lease_id in self._idle.choose(now, uses, self._backups.is_needed):
            self._backups.retire_slots(Tier.PEER, self._slots.slots_of(held[lease_id]))
            self._give_back(lease_id)

    def _force(self, lease_id: LeaseId) -> None:
        """Free the memory now, on any thread; the loop drops what it believed to be there at its next boundary."""
        with self._lock:
            chunk = self._held.pop(lease_id, None)
            if chunk is None:
                return
            self._forced.append(chunk)
        self._slots.remove(chunk)
        self._client.freed(lease_id)
        self.totals.num_forced += 1
        logger.warning("lease %s was due before it was empty: what lay there is computed again", lease_id)

    def _bury_forced(self) -> None:
        with self._lock:
            forced, self._forced = self._forced, []
        for chunk in forced:
            slots = self._slots.slots_of(chunk)
            self._backups.retire_slots(Tier.PEER, slots)
            self._relocations.abandon(Tier.PEER, slots)
        self._leaving &= self._held.keys()

    # -- grants ------------------------------------------------------------------------------------------------------

    def _use_grants(self) -> None:
        for lease in self._requests.take_grants():
            chunk = self._free_chunk()
            extent = self._requests.allocate(lease, has_place=chunk is not None)
            if chunk is not None and extent is not None:
                self._slots.add(chunk, extent)
                with self._lock:
                    self._held[lease.lease_id] = chunk
                self._backups.add_slots(Tier.PEER, self._slots.slots_of(chunk))
                self.totals.num_granted += 1

    def _free_chunk(self) -> int | None:
        """Return a chunk without memory of which no slot is taken any more; None if there is none."""
        used, ledger = {*self._held.values(), *self._forced}, self._backups.slots[Tier.PEER]
        chunks = (chunk for chunk in range(self._slots.max_chunks) if chunk not in used)
        return next((chunk for chunk in chunks if not ledger.count_taken(self._slots.slots_of(chunk))), None)

    def _ask(self) -> None:
        """None are requested while some are recalled."""
        if self._leaving:
            return
        num_chunks = len(self._held) + len(self._forced)
        self._idle.note_room(num_chunks, self._backups.num_available(Tier.PEER), self._backups.is_needed)
        self._requests.follow(self._idle.num_wanted - num_chunks)

    def _come_nearer(self) -> None:
        """Start to copy blocks from the host back to the PEER tier if the links are otherwise idle."""
        if not self._leaving and not self._relocations.num_in_flight:
            relocation = self._relocations.bring_nearer(Tier.HOST, Tier.PEER, BLOCKS_PER_RELOCATION)
            if relocation is not None:
                self._mover.submit(relocation)
