"""The machine of ``vllm_machine.py``, with slots on neighbours that are added and removed beside requests.

A chunk of slots is added, retired and emptied, or torn away with its contents. Copies that touch removed slots fail, as
with real memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from floodplain.core.plan import Relocation
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.runtime.relocations import Relocations
from tests.support.vllm_books import LOST, Flight, Token
from tests.support.vllm_machine import INDEX, NUM_REQUESTS, BooksMachine

CHUNK_SLOTS, NUM_CHUNKS = 3, 3


@dataclass
class Move:
    """A relocation in flight, and the contents of its sources when it began."""

    relocation: Relocation
    seen: list[list[Token | None]]
    is_torn: bool = False


class LeasingMachine(BooksMachine):
    """See the module."""

    @initialize(num_slots=st.sampled_from([0, 3, 9, 20]), num_blocks=st.sampled_from([5, 9, 20]))
    def begin(self, num_slots: int, num_blocks: int, num_requests: int = NUM_REQUESTS) -> None:
        super().begin(num_slots, num_blocks, num_requests)
        self.relocations = Relocations(self.books)
        self.chunks: dict[int, bool] = {}  # those with memory, and whether they are being emptied
        self.moves: list[Move] = []
        self.torn: list[Flight] = []
        self.seen = Counter[str]()

    def _make_slots(self, num_slots: int) -> list[SlotLedger]:
        return [SlotLedger(Tier.PEER, 0), *super()._make_slots(num_slots)]

    # -- events ----------------------------------------------------------------------------------------------------

    @rule(chunk=st.integers(0, NUM_CHUNKS - 1))
    def add(self, chunk: int) -> None:
        slots = self._slots(chunk)
        if chunk not in self.chunks and not self.books.backups.slots[Tier.PEER].count_taken(slots):
            self.chunks[chunk] = False
            self.books.backups.add_slots(Tier.PEER, slots)

    @precondition(lambda self: self.chunks)
    @rule(index=INDEX)
    def retire(self, index: int) -> None:
        chunk = sorted(self.chunks)[index % len(self.chunks)]
        if not self.chunks[chunk]:
            self.chunks[chunk] = True
            self.books.backups.retire_slots(Tier.PEER, self._slots(chunk))

    @precondition(lambda self: self.chunks)
    @rule(index=INDEX, is_sure=st.sampled_from([True, False, False]))
    def tear_away(self, index: int, is_sure: bool = True) -> None:
        """At the deadline the memory is removed first, and the books are informed afterwards."""
        if not is_sure:
            return
        chunk = sorted(self.chunks)[index % len(self.chunks)]
        slots = self._slots(chunk)
        self.seen["torn away with something in it"] += self.books.backups.slots[Tier.PEER].count_taken(slots) > 0
        self._remove_memory(chunk)
        self.books.backups.retire_slots(Tier.PEER, slots)
        self.relocations.abandon(Tier.PEER, slots)

    @rule(most=st.integers(1, 4))
    def evacuate(self, most: int) -> None:
        for chunk in sorted(chunk for chunk, is_leaving in self.chunks.items() if is_leaving):
            slots = self._slots(chunk)
            self._launch_move(self.relocations.evacuate(Tier.PEER, slots, Tier.HOST, most), "evacuated")
            if not self.books.backups.slots[Tier.PEER].count_taken(slots):
                self.seen["emptied"] += 1
                self._remove_memory(chunk)

    @rule(most=st.integers(1, 4))
    def bring_nearer(self, most: int) -> None:
        self._launch_move(self.relocations.bring_nearer(Tier.HOST, Tier.PEER, most), "brought nearer")

    @precondition(lambda self: self.moves)
    @rule(index=INDEX, ok=st.sampled_from([True, True, True, False]))
    def settle_move(self, index: int, ok: bool = True) -> None:
        move = self.moves.pop(index % len(self.moves))
        arrived = ok and not move.is_torn
        if arrived:
            for location, content in zip(move.relocation.targets, move.seen, strict=True):
                self.slots[location] = content
        self.relocations.settle(move.relocation.relocation_id, () if arrived else range(len(move.seen)))

    # -- how -------------------------------------------------------------------------------------------------------

    def _slots(self, chunk: int) -> range:
        return range(chunk * CHUNK_SLOTS, (chunk + 1) * CHUNK_SLOTS)

    def _launch_move(self, relocation: Relocation | None, why: str) -> None:
        if relocation is not None:
            self.seen[why] += 1
            self.moves.append(Move(relocation, [self.slots[location].copy() for location in relocation.sources]))

    def _remove_memory(self, chunk: int) -> None:
        del self.chunks[chunk]
        slots = self._slots(chunk)
        for location in self.slots:
            if location.tier is Tier.PEER and location.slot in slots:
                self.slots[location] = LOST.copy()

        def touches(locations: Any) -> bool:
            return any(one.tier is Tier.PEER and one.slot in slots for one in locations)

        self.torn += [flight for flight in self.flights if touches(flight.transfer.locations)]
        for move in self.moves:
            move.is_torn |= touches(move.relocation.sources) or touches(move.relocation.targets)

    def _take_out(self, flight: Flight, lost: frozenset[int]) -> None:
        super()._take_out(flight, self._lose_torn(flight, lost))

    def _bring_in(self, flight: Flight, lost: frozenset[int]) -> None:
        super()._bring_in(flight, self._lose_torn(flight, lost))

    def _lose_torn(self, flight: Flight, lost: frozenset[int]) -> frozenset[int]:
        return frozenset(range(len(flight.blocks))) if flight in self.torn else lost

    @invariant()
    def all_slots_are_where_memory_is(self) -> None:
        slots = self.books.backups.slots[Tier.PEER]
        assert slots.num_slots == CHUNK_SLOTS * sum(not is_leaving for is_leaving in self.chunks.values())

    def teardown(self) -> None:
        if hasattr(self, "moves"):
            while self.moves:
                self.settle_move(0)
        super().teardown()
