"""The PEER tier of an engine: leases become slots; recalled ones are emptied and returned in time.

All of it happens at iteration boundaries, except for the last resort: if a deadline comes before the step loop's next
boundary, another thread frees the memory. Its content is a miss then, and is computed again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from floodplain.core.tiers import Tier
from floodplain.leases.client import LeaseClient
from floodplain.leases.states import LeaseId
from floodplain.lending.idle_chunks import ChunkUse, IdleChunks
from floodplain.lending.requests import LOOK_S, LeaseRequests, PeerTotals
from floodplain.memory.peer.memory import PeerMemory
from floodplain.memory.peer.slots import PeerSlots, SlotMover
from floodplain.runtime.relocations import Relocations

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2
BLOCKS_PER_RELOCATION = 16
"""A relocation shares the links with other copies: a small one delays nothing for long."""
MARGIN_S = 0.25
"""So long before a deadline the memory is freed even if not empty: a copy under way there must still end."""


class PeerTier:
    """Borrows chunks of slots for swap space. The step loop calls ``at_boundary`` and ``close``, any thread ``hurry``.

    Args:
        client: Of the coordinator.
        memory: Of other devices.
        slots: Without memory at first.
        mover: Copies between these slots and the host's; started.
        relocations: Of the loop.
        look_s: Seconds between two polls of the leases.
        idle_s: A chunk that was not used for so long is returned; 0 keeps all.
        siblings: As of ``LeaseRequests``.
    """

    def __init__(
        self,
        client: LeaseClient,
        memory: PeerMemory,
        slots: PeerSlots,
        mover: SlotMover,
        relocations: Relocations,
        look_s: float = LOOK_S,
        idle_s: float = 0.0,
        siblings: list[LeaseRequests] | None = None,
    ) -> None:
        self.totals = PeerTotals()
        self._look_s = look_s
        self._client, self._slots, self._mover = client, slots, mover
        self._relocations = relocations
        self._idle = IdleChunks(idle_s, slots.chunk_slots, slots.max_chunks)
        self._next_look_s = float("-inf")
        self._requests = LeaseRequests(client, memory, slots.chunk_bytes, self.totals, siblings)
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
                self._relocations.retire_slots(Tier.PEER, slots)
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
        return not self._relocations.count_taken(Tier.PEER, slots)

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
        num_kept = Counter(slot // self._slots.chunk_slots for slot in self._relocations.kept_slots(Tier.PEER))
        uses = {lease_id: ChunkUse(self._slots.num_copies(chunk), num_kept[chunk]) for lease_id, chunk in held.items()}
        for lease_id in self._idle.choose(now, uses, self._relocations.is_needed):
            self._relocations.retire_slots(Tier.PEER, self._slots.slots_of(held[lease_id]))
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
            self._relocations.retire_slots(Tier.PEER, slots)
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
                self._relocations.add_slots(Tier.PEER, self._slots.slots_of(chunk))
                self.totals.num_granted += 1

    def _free_chunk(self) -> int | None:
        """Return a chunk without memory of which no slot is taken any more; None if there is none."""
        used = {*self._held.values(), *self._forced}
        chunks = (chunk for chunk in range(self._slots.max_chunks) if chunk not in used)
        is_free = (
            chunk for chunk in chunks if not self._relocations.count_taken(Tier.PEER, self._slots.slots_of(chunk))
        )
        return next(is_free, None)

    def _ask(self) -> None:
        """None are requested while some are recalled."""
        if self._leaving:
            return
        num_chunks, between = len(self._held) + len(self._forced), self._relocations
        self._idle.note_room(num_chunks, between.num_available(Tier.PEER), between.is_needed)
        self._requests.follow(self._idle.num_wanted - num_chunks)

    def _come_nearer(self) -> None:
        """Start to copy blocks from the host back to the PEER tier if the links are otherwise idle."""
        if not self._leaving and not self._relocations.num_in_flight:
            relocation = self._relocations.bring_nearer(Tier.HOST, Tier.PEER, BLOCKS_PER_RELOCATION)
            if relocation is not None:
                self._mover.submit(relocation)
