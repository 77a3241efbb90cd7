"""Requests of vLLM come, compute, leave the device and come back; what ``test_vllm_books_laws.py`` is about.

Copies take effect as late as they may, when they are settled: what is given away or written too early shows. A copy
back that is not whole has found a slot damaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction, Location, SlotLedger, Tier
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.vllm_books import BLOCK_TOKENS, LOST, Flight, Guest, Pool, Token, holds

MAX_TOKENS, NUM_GUESTS, NUM_TEXTS = 18, 4, 2
INDEX = st.integers(0, 63)
ALL = -1
"""All bits."""
NUM_TOKENS = st.sampled_from([18, 9, 4, 1])


def is_anybody(where: str) -> Callable[[Any], Any]:
    return precondition(lambda self: any(guest.where == where for guest in self.guests))


class BooksMachine(RuleBasedStateMachine):
    """Requests come, compute, leave the device in all ways that vLLM has, and come back."""

    @initialize(num_slots=st.sampled_from([0, 3, 9, 20]), num_blocks=st.sampled_from([5, 9, 20]))
    def begin(self, num_slots: int, num_blocks: int, num_guests: int = NUM_GUESTS) -> None:
        self.num_arrived = self.num_resets = 0
        self.pool, self.books = Pool(num_blocks), SwapBooks(self._make_slots(num_slots), BLOCK_TOKENS)
        self.books.bind(self.pool)
        self.guests: list[Guest] = []
        self.flights: list[Flight] = []
        self.slots: dict[Location, list[Token | None]] = {}
        for _ in range(num_guests):
            self._arrive()

    # -- what happens ----------------------------------------------------------------------------------------------

    @is_anybody("off")
    @rule(index=INDEX, most_found=st.sampled_from([0, 0, 1, 4]), num_tokens=NUM_TOKENS)
    def come(self, index: int, most_found: int = 0, num_tokens: int = MAX_TOKENS) -> None:
        """As vLLM admits: what it finds on the device, then what we can restore, then blocks for both."""
        guest = self._pick(index, "off")
        found = self.pool.find(guest.text, min(most_found, (guest.num_tokens - 1) // BLOCK_TOKENS))
        num_local = len(found) * BLOCK_TOKENS
        num_there = max(num_local, min(self.books.count_restorable(guest.tracked), guest.num_tokens - 1))
        num_new = -(-num_there // BLOCK_TOKENS) - len(found)
        if num_new > len(self.pool.free) - sum(not block.ref_cnt for block in found):
            return
        self.pool.touch(found)
        guest.blocks, guest.num_computed = [*found, *self.pool.give(num_new)], num_there
        if num_there > num_local:
            guest.where = "coming"
            self.books.fetch(guest.tracked, guest.blocks, num_local, num_there)
            self._launch(guest)
        else:
            self._start(guest)
            self._compute(guest, num_tokens)

    @is_anybody("on")
    @rule(index=INDEX, num_tokens=NUM_TOKENS)
    def compute(self, index: int, num_tokens: int) -> None:
        self._compute(self._pick(index, "on"), num_tokens)

    @is_anybody("on")
    @rule(index=INDEX, most=st.integers(1, 3))
    def back_up(self, index: int, most: int) -> None:
        guest = self._pick(index, "on")
        self.books.back_up(guest.tracked, guest.blocks, guest.num_computed, most, self._pick_tier(most))
        self._launch(guest)

    @is_anybody("on")
    @rule(index=INDEX, swaps=st.sampled_from([True, True, True, False]))
    def leave(self, index: int, swaps: bool = True) -> None:
        """It is preempted; its blocks are still its own when we are told."""
        guest = self._pick(index, "on")
        if swaps:
            num_missing = -(-guest.num_computed // BLOCK_TOKENS) - len(guest.tracked.backups)
            has_room = num_missing <= sum(map(self.books.backups.num_available, self.books.backups.slots))
            tier = self._pick_tier(guest.num_tokens)
            kept = self.books.swap_out(guest.tracked, guest.blocks, guest.num_computed, Reason.SLICE_ENDED, tier)
            assert kept == (guest.num_computed > 0 and has_room)
            assert kept or not (guest.tracked.backups or guest.tracked.tail)
        else:
            self.books.forget(guest.tracked)
        self._launch(guest)
        self._put_off(guest)

    @rule(index=INDEX, is_sure=st.sampled_from([False, True, False]))
    def end(self, index: int, is_sure: bool) -> None:
        """Somebody ends or is aborted, wherever it is, and somebody else arrives."""
        if is_sure:
            self._end(self.guests.pop(index % len(self.guests)))
            self._arrive()

    @rule(is_sure=st.sampled_from([False, False, True]))
    def reset(self, is_sure: bool = True) -> None:
        """The model has other weights: from now on the same tokens have other KV, and all blocks must be free."""
        if is_sure:
            late = [flight.guest for flight in self.flights if flight.is_inbound and not flight.is_void]
            for guest in self.guests:
                self.books.forget(guest.tracked)
            self.books.void_copies()
            for guest in {id(guest): guest for guest in (*self.guests, *late)}.values():
                if guest.where != "off":
                    self._put_off(guest)
                guest.text += NUM_TEXTS
            for flight in self.flights:
                flight.is_void = True
            self.num_resets += 1

    @precondition(lambda self: self.flights)
    @rule(index=INDEX, losses=st.sampled_from([0, 0, 0, 1, 2, ALL]))
    def settle(self, index: int, losses: int = 0) -> None:
        """Each bit of ``losses`` that is set loses a block."""
        flight = self.flights.pop(index % len(self.flights))
        lost = frozenset(place for place in range(len(flight.blocks)) if losses >> place & 1)
        (self._bring_in if flight.is_inbound else self._take_out)(flight, lost)

    @rule()
    def settle_all(self) -> None:
        while self.flights:
            self.settle(0)

    # -- where to --------------------------------------------------------------------------------------------------

    def _make_slots(self, num_slots: int) -> list[SlotLedger]:
        return [SlotLedger(Tier.HOST, num_slots)]

    def _pick_tier(self, number: int) -> Tier:
        tiers = list(self.books.backups.slots)
        return tiers[number % len(tiers)]

    # -- how -------------------------------------------------------------------------------------------------------

    def _pick(self, index: int, where: str) -> Guest:
        there = [guest for guest in self.guests if guest.where == where]
        return there[index % len(there)]

    def _arrive(self) -> None:
        request = cast(Any, SimpleNamespace(request_id=f"request-{self.num_arrived}", priority=0, arrival_time=0.0))
        tracked = TrackedRequest(SeqId(self.num_arrived), request, 0.0)
        text = self.num_arrived % NUM_TEXTS + NUM_TEXTS * self.num_resets
        self.guests.append(Guest(tracked, text, num_tokens=10 + self.num_arrived % 5))
        self.num_arrived += 1

    def _compute(self, guest: Guest, num_tokens: int) -> None:
        """Some of the tokens that it knows; after the last of them it knows one more."""
        end = min(guest.num_computed + num_tokens, guest.num_tokens, MAX_TOKENS)
        num_missing = -(-end // BLOCK_TOKENS) - len(guest.blocks)
        if num_missing <= len(self.pool.free):
            guest.blocks += self.pool.give(num_missing)
            for position in range(guest.num_computed, end):
                guest.blocks[position // BLOCK_TOKENS].content[position % BLOCK_TOKENS] = (guest.text, position)
            guest.num_computed, guest.num_tokens = end, guest.num_tokens + (end == guest.num_tokens)

    def _end(self, guest: Guest) -> None:
        """Blocks that are being filled are freed when they are, as vLLM does."""
        guest.is_gone = True
        self.books.forget(guest.tracked)
        if guest.where != "coming":
            self._put_off(guest)

    def _launch(self, guest: Guest) -> None:
        for transfer in self.books.take_due():
            blocks = [self.pool.blocks[block] for block in transfer.blocks]
            self.flights.append(Flight(transfer, guest, blocks, [block.content.copy() for block in blocks]))
            is_inbound = self.flights[-1].is_inbound
            number = transfer.transfer_id
            assert self.books.take_owners() == ({number: str(number)} if is_inbound else {})

    def _start(self, guest: Guest) -> None:
        guest.where = "on"
        self.books.note_start(guest.tracked)
        for index, block in enumerate(guest.blocks):
            assert holds(block.content, guest.text, index, guest.num_computed), (
                "it goes on with what it did not compute"
            )

    def _put_off(self, guest: Guest) -> None:
        self.pool.free_blocks(guest.blocks[::-1])
        guest.blocks, guest.num_computed, guest.where = [], 0, "off"

    def _take_out(self, flight: Flight, lost: frozenset[int]) -> None:
        are_there = [block.content for block in flight.blocks] == flight.seen
        assert are_there or flight.is_void, "written before it was read"
        for place, (location, content) in enumerate(zip(flight.transfer.locations, flight.seen, strict=True)):
            self.slots[location] = LOST.copy() if place in lost else content
        self.books.settle(flight.transfer.transfer_id, lost)

    def _bring_in(self, flight: Flight, lost: frozenset[int]) -> None:
        guest = flight.guest
        for place, (location, block) in enumerate(zip(flight.transfer.locations, flight.blocks, strict=True)):
            self.slots[location] = LOST if place in lost else self.slots[location]
            block.content = self.slots[location].copy()
        owner = self.books.find_owner(str(flight.transfer.transfer_id))
        assert owner == (None if flight.is_void else guest.tracked.request.request_id), "who waits for it"
        self.books.settle(flight.transfer.transfer_id, lost)
        if flight.is_void:
            return
        if guest.is_gone or lost:
            self._put_off(guest)
        else:
            self._start(guest)

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_held_by_its_owners_and_its_copies_out(self) -> None:
        late = [f.guest for f in self.flights if f.is_inbound and f.guest.is_gone and not f.is_void]
        held = Counter(block for guest in (*self.guests, *late) for block in guest.blocks)
        copied = Counter(block for flight in self.flights if flight.is_holding for block in flight.blocks)
        assert {block: block.ref_cnt for block in self.pool.blocks if block.ref_cnt} == dict(held + copied)
        assert Counter(self.pool.free) == Counter(block for block in self.pool.blocks if not block.ref_cnt)
        draining = [block for block in copied if block not in held]
        if max(copied.values(), default=0) <= 1:
            assert self.books.num_draining_blocks == len(draining)

    @invariant()
    def books_agree_with_what_is_under_way(self) -> None:
        self.books.backups.check_integrity()
        sizes = Counter[Direction]()
        leaving = Counter[TrackedRequest]()
        for flight in self.flights:
            sizes[flight.transfer.kind.direction] += len(flight.blocks)
            leaving[flight.guest.tracked] += len(flight.blocks) * (not flight.is_inbound)
        for direction in Direction:
            moving = [self.books.count_moving(tier, direction) for tier in self.books.backups.slots]
            assert sum(moving) == sizes[direction]
        assert self.books.num_in_flight == len(self.flights)
        assert all(guest.tracked.num_leaving == leaving[guest.tracked] for guest in self.guests)

    @invariant()
    def what_can_be_restored_is_there(self) -> None:
        for guest in self.guests:
            tracked, num_tokens = guest.tracked, self.books.count_restorable(guest.tracked)
            assert num_tokens <= guest.num_tokens
            known = tracked.known_backups
            for index, backup in enumerate(known[: -(-num_tokens // BLOCK_TOKENS)]):
                assert holds(self.slots[backup.location], guest.text, index, num_tokens)
            assert tracked.num_leaving or all(backup.is_whole for backup in known), "what is kept can come back"

    def teardown(self) -> None:
        if hasattr(self, "books"):
            while self.guests:
                self._end(self.guests.pop())
            self.settle_all()
            assert all(block.ref_cnt == 0 for block in self.pool.blocks)
            assert self.books.backups.is_at_rest
