"""vLLM's requests on borrowed memory that comes and goes: restored KV is what was computed, whatever was lost.

The machine is that of ``vllm_machine.py``, with slots on neighbours that are added and removed beside requests: a chunk
of slots is added, retired and emptied, or torn away with its contents. Copies that touch removed slots fail, as with
real memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from floodplain.core.errors import InvariantError
from floodplain.core.plan import Relocation
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.runtime.relocations import Relocations
from tests.support.controls import Controls, Fault
from tests.support.examples import examples
from tests.support.vllm_books import LOST, Flight, Token
from tests.support.vllm_machine import ALL, INDEX, NUM_REQUESTS, BooksMachine

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


LeasingMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLeasingMachine = LeasingMachine.TestCase


def take_a_step(machine: LeasingMachine, rng: Random) -> None:
    index, where = rng.randrange(64), {request.where for request in machine.requests}
    rules: list[Callable[[], None]] = [partial(machine.end, index, rng.random() < 0.1)]
    rules += [partial(machine.add, rng.randrange(NUM_CHUNKS)), partial(machine.evacuate, 2)]
    rules += [partial(machine.bring_nearer, 2)]
    if machine.chunks and rng.random() < 0.3:
        rules += [partial(machine.retire, index), partial(machine.tear_away, index, rng.random() < 0.3)]
    if "off" in where:
        rules += [partial(machine.come, index, rng.choice([0, 0, 1, 4]), rng.choice([0, 4, 18]))] * 2
    if "on" in where:
        rules += [partial(machine.compute, index, rng.choice([1, 4, 9]))]
        rules += [partial(machine.back_up, index, rng.randint(1, 3))]
        rules += [partial(machine.leave, index, rng.random() < 0.9)]
    if machine.flights:
        rules += [partial(machine.settle, index, rng.choice([0] * 18 + [1, ALL]))] * 3
    if machine.moves:
        rules += [partial(machine.settle_move, index, rng.random() < 0.9)] * 2
    rng.choice(rules)()


def walk(machine: LeasingMachine, rng: Random, num_steps: int) -> Counter[str]:
    """Run random rules for longer than Hypothesis does; return the counts of events."""
    machine.begin(num_slots=rng.choice([5, 9, 16]), num_blocks=rng.choice([7, 12, 30]))
    for _ in range(num_steps):
        take_a_step(machine, rng)
        machine.every_block_is_held_by_its_owners_and_its_copies_out()
        machine.books_agree_with_what_is_under_way()
        machine.what_can_be_restored_is_there()
        machine.all_slots_are_where_memory_is()
    machine.teardown()
    return machine.seen


def test_long_walks_by_the_same_rules_see_everything() -> None:
    seen = Counter[str]()
    for seed in range(examples(12)):
        seen += walk(LeasingMachine(), Random(seed), num_steps=400)
    assert all(seen[what] > 10 for what in ("evacuated", "emptied", "brought nearer", "torn away with something in it"))


def swap_out_to_a_neighbour(machine: LeasingMachine, num_slots: int = 6) -> None:
    """Swap out a request of eight tokens, to two slots of the neighbour."""
    machine.begin(num_slots=num_slots, num_blocks=4, num_requests=1)
    machine.add(0)
    machine.come(0, num_tokens=8)
    request = machine.requests[0]
    assert machine.books.swap_out(request.tracked, [request.blocks], request.num_computed, reason=None, tier=Tier.PEER)  # type: ignore[arg-type]
    machine._launch(request)
    machine._put_off(request)
    machine.settle(0)
    assert [backup.location.tier for backup in request.tracked.backups] == [Tier.PEER] * 2


def tour(machine: LeasingMachine) -> None:
    """Recalled KV is moved to the host and later promoted; then its chunk is torn away."""
    swap_out_to_a_neighbour(machine)
    (request,) = machine.requests
    machine.retire(0)
    machine.evacuate(4)
    machine.settle_move(0)
    machine.evacuate(4)
    assert not machine.chunks and machine.books.count_restorable(request.tracked) == 8, "nothing is computed again"
    machine.add(1)
    machine.bring_nearer(1)
    machine.settle_move(0)
    assert request.tracked.backups[0].location.tier is Tier.PEER
    machine.what_can_be_restored_is_there()
    machine.tear_away(0)
    machine.what_can_be_restored_is_there()
    machine.books_agree_with_what_is_under_way()
    assert machine.books.count_restorable(request.tracked) == 0
    machine.come(0, num_tokens=8)
    machine.teardown()


def test_a_tour_of_borrowed_memory() -> None:
    tour(LeasingMachine())


def test_without_room_elsewhere_recalled_kv_is_recomputed() -> None:
    machine = LeasingMachine()
    swap_out_to_a_neighbour(machine, num_slots=0)
    machine.retire(0)
    machine.evacuate(4)
    assert not machine.chunks and machine.books.count_restorable(machine.requests[0].tracked) == 0
    machine.teardown()


def test_what_is_on_the_device_too_is_not_copied_from_a_neighbour() -> None:
    machine = LeasingMachine()
    swap_out_to_a_neighbour(machine)
    machine.come(0)
    machine.settle(0)  # its swap-in: it runs
    machine.retire(0)
    machine.evacuate(4)
    assert not machine.moves and not machine.chunks
    machine.teardown()


CONTROLS = Controls()
CONTROLS.add("keeps_what_is_torn_away", Relocations, "abandon", lambda _, between, tier, slots: None)
CONTROLS.add("keeps_what_is_lost", SwapBooks, "drop_lost", lambda _, books, lost: None)
CONTROLS.add("believes_all_of_it_is_on_the_device", SwapBooks, "is_on_device", lambda _, books, backup: True)
CONTROLS.add("takes_no_request_for_swapped_out", SwapBooks, "swapped_backups", lambda _, books: ())


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_tour_notices_books_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, IndexError, KeyError, ZeroDivisionError)):
        tour(LeasingMachine())
