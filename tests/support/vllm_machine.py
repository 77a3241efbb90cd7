"""The machine of ``test_vllm_books_laws.py``: requests of vLLM arrive, compute, are preempted and resumed.

Copies take effect as late as possible, when they are settled, so blocks that are reused or written too early are found.
A swap-in that is not whole has found a damaged slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.idle_backups import Pin
from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction, Location, SlotLedger, Tier
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.messages import COPY
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.vllm_books import BLOCK_TOKENS, LOST, Flight, LiveRequest, Pool, Token, holds

MAX_TOKENS, NUM_REQUESTS, NUM_TEXTS = 18, 4, 2
INDEX = st.integers(0, 63)
ALL = -1
"""All bits."""
NUM_TOKENS = st.sampled_from([18, 9, 4, 1])


def needs_a_request(where: str) -> Callable[[Any], Any]:
    return precondition(lambda self: any(request.where == where for request in self.requests))


class BooksMachine(RuleBasedStateMachine):
    """Requests arrive, compute, are preempted in all ways that vLLM has, and are resumed."""

    by_content = False

    @initialize(num_slots=st.sampled_from([0, 3, 9, 20]), num_blocks=st.sampled_from([5, 9, 20]))
    def begin(self, num_slots: int, num_blocks: int, num_requests: int = NUM_REQUESTS) -> None:
        self.num_arrived = self.num_resets = 0
        slots, groups = self._make_slots(num_slots), [CacheGroup(BLOCK_TOKENS)]
        self.pool, self.books = Pool(num_blocks), SwapBooks(slots, groups, by_content=self.by_content)
        self.books.bind(self.pool)
        self.requests: list[LiveRequest] = []
        self.flights: list[Flight] = []
        self.slots: dict[Location, list[Token | None]] = {}
        for _ in range(num_requests):
            self._arrive()

    # -- events ----------------------------------------------------------------------------------------------------

    @needs_a_request("off")
    @rule(index=INDEX, most_found=st.sampled_from([0, 0, 1, 4]), num_tokens=NUM_TOKENS)
    def come(self, index: int, most_found: int = 0, num_tokens: int = MAX_TOKENS) -> None:
        """Admit as vLLM does: blocks found on the device, then restorable ones, then new blocks for the rest."""
        request = self._pick(index, "off")
        found = self.pool.find(request.text, min(most_found, (request.num_tokens - 1) // BLOCK_TOKENS))
        num_local = len(found) * BLOCK_TOKENS
        num_there = max(num_local, min(self.books.count_restorable(request.tracked), request.num_tokens - 1))
        num_new = -(-num_there // BLOCK_TOKENS) - len(found)
        if num_new > len(self.pool.free) - sum(not block.ref_cnt for block in found):
            return
        self.pool.touch(found)
        request.blocks, request.num_computed = [*found, *self.pool.give(num_new)], num_there
        if num_there > num_local:
            request.where = "coming"
            self.books.fetch(request.tracked, [request.blocks], num_local, num_there)
            self._launch(request)
        else:
            self._start(request)
            self._compute(request, num_tokens)

    @needs_a_request("on")
    @rule(index=INDEX, num_tokens=NUM_TOKENS)
    def compute(self, index: int, num_tokens: int) -> None:
        self._compute(self._pick(index, "on"), num_tokens)

    @needs_a_request("on")
    @rule(index=INDEX, most=st.integers(1, 3))
    def back_up(self, index: int, most: int) -> None:
        request = self._pick(index, "on")
        self.books.back_up(request.tracked, [request.blocks], request.num_computed, most, self._pick_tier(most))
        self._launch(request)

    @needs_a_request("on")
    @rule(index=INDEX, num_tokens=NUM_TOKENS)
    def cut(self, index: int, num_tokens: int) -> None:
        """The tokens of a request behind the first ones are replaced: no backup of them is left."""
        request = self._pick(index, "on")
        num_before, request.num_computed = len(request.tracked.backups), min(request.num_computed, num_tokens)
        self.books.cut(request.tracked, request.num_computed)
        assert len(request.tracked.backups) == min(num_before, request.num_computed // BLOCK_TOKENS)

    @needs_a_request("off")
    @rule(index=INDEX, num_tokens=NUM_TOKENS)
    def cut_away(self, index: int, num_tokens: int) -> None:
        """The same of a request that was preempted: none of the replaced tokens can be restored."""
        tracked = self._pick(index, "off").tracked
        self.books.cut(tracked, num_tokens)
        assert self.books.count_restorable(tracked) <= num_tokens

    @needs_a_request("on")
    @rule(index=INDEX, swaps=st.sampled_from([True, True, True, False]))
    def leave(self, index: int, swaps: bool = True) -> None:
        """Preempt a request; it still owns its blocks when the books get the call."""
        request = self._pick(index, "on")
        if swaps:
            num_missing = -(-request.num_computed // BLOCK_TOKENS) - len(request.tracked.backups)
            has_room = num_missing <= sum(map(self.books.backups.num_available, self.books.backups.slots))
            tier = self._pick_tier(request.num_tokens)
            kept = self.books.swap_out(
                request.tracked, [request.blocks], request.num_computed, Reason.SLICE_ENDED, tier
            )
            assert kept == (request.num_computed > 0 and has_room)
            assert kept or not (request.tracked.backups or request.tracked.rest)
        else:
            self.books.forget(request.tracked)
        self._launch(request)
        self._put_off(request)

    @rule(index=INDEX, is_sure=st.sampled_from([False, True, False]))
    def end(self, index: int, is_sure: bool) -> None:
        """A request ends or is aborted, in any state, and another one arrives."""
        if is_sure:
            self._end(self.requests.pop(index % len(self.requests)))
            self._arrive()

    @rule(is_sure=st.sampled_from([False, False, True]))
    def reset(self, is_sure: bool = True) -> None:
        """Load other weights: from now on the same tokens have other KV, and all blocks must be free."""
        if is_sure:
            late = [flight.request for flight in self.flights if flight.is_inbound and not flight.is_void]
            for request in self.requests:
                self.books.forget(request.tracked)
            self.books.void_copies()
            for request in {id(request): request for request in (*self.requests, *late)}.values():
                if request.where != "off":
                    self._put_off(request)
                request.text += NUM_TEXTS
            for flight in self.flights:
                flight.is_void = True
            self.num_resets += 1

    @precondition(lambda self: self.flights)
    @rule(index=INDEX, losses=st.sampled_from([0, 0, 0, 1, 2, ALL]))
    def settle(self, index: int, losses: int = 0) -> None:
        """End a copy; each set bit of ``losses`` loses a block."""
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

    def _pick(self, index: int, where: str) -> LiveRequest:
        there = [request for request in self.requests if request.where == where]
        return there[index % len(there)]

    def _arrive(self) -> None:
        request = cast(Any, SimpleNamespace(request_id=f"request-{self.num_arrived}", priority=0))
        tracked = TrackedRequest(SeqId(self.num_arrived), request, credit=0.0, arrival_s=0.0)
        text = self.num_arrived % NUM_TEXTS
        request.block_hashes = [b"text %d, block %d" % (text, index) for index in range(MAX_TOKENS // BLOCK_TOKENS)]
        request.skip_reading_prefix_cache = False
        live = LiveRequest(tracked, text + NUM_TEXTS * self.num_resets, num_tokens=10 + self.num_arrived % 5)
        request.num_tokens = live.num_tokens
        self.requests.append(live)
        self.num_arrived += 1

    def _compute(self, request: LiveRequest, num_tokens: int) -> None:
        """Compute some known tokens; after the last one, the request gets another."""
        end = min(request.num_computed + num_tokens, request.num_tokens, MAX_TOKENS)
        num_missing = -(-end // BLOCK_TOKENS) - len(request.blocks)
        if num_missing <= len(self.pool.free):
            request.blocks += self.pool.give(num_missing)
            for position in range(request.num_computed, end):
                request.blocks[position // BLOCK_TOKENS].content[position % BLOCK_TOKENS] = (request.text, position)
            request.num_computed, request.num_tokens = end, request.num_tokens + (end == request.num_tokens)

    def _end(self, request: LiveRequest) -> None:
        """End a request; blocks that a swap-in fills are freed when it ends, as in vLLM."""
        request.is_gone = True
        self.books.forget(request.tracked)
        if request.where != "coming":
            self._put_off(request)

    def _launch(self, request: LiveRequest) -> None:
        for transfer in self.books.take_due():
            blocks = [self.pool.blocks[block] for block in transfer.blocks]
            self.flights.append(Flight(transfer, request, blocks, [block.content.copy() for block in blocks]))

    def _start(self, request: LiveRequest) -> None:
        request.where = "on"
        self.books.note_start(request.tracked)
        for index, block in enumerate(request.blocks):
            assert holds(block.content, request.text, index, request.num_computed), (
                "it goes on with what it did not compute"
            )

    def _put_off(self, request: LiveRequest) -> None:
        self.pool.free_blocks(request.blocks[::-1])
        request.blocks, request.num_computed, request.where = [], 0, "off"

    def _take_out(self, flight: Flight, lost: frozenset[int]) -> None:
        are_there = [block.content for block in flight.blocks] == flight.seen
        assert are_there or flight.is_void, "written before it was read"
        for place, (location, content) in enumerate(zip(flight.transfer.locations, flight.seen, strict=True)):
            self.slots[location] = LOST.copy() if place in lost else content
        self.books.settle(flight.transfer.transfer_id, lost)

    def _bring_in(self, flight: Flight, lost: frozenset[int]) -> None:
        request = flight.request
        for place, (location, block) in enumerate(zip(flight.transfer.locations, flight.blocks, strict=True)):
            self.slots[location] = LOST if place in lost else self.slots[location]
            block.content = self.slots[location].copy()
        owner = self.books.find_owner(f"{COPY}{flight.transfer.transfer_id}")
        assert owner == (None if flight.is_void else request.tracked.request.request_id), (
            "the request that waits for it"
        )
        self.books.settle(flight.transfer.transfer_id, lost)
        if flight.is_void:
            return
        if request.is_gone or lost:
            self._put_off(request)
        else:
            self._start(request)

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_held_by_its_owners_and_its_copies_out(self) -> None:
        late = [f.request for f in self.flights if f.is_inbound and f.request.is_gone and not f.is_void]
        held = Counter(block for request in (*self.requests, *late) for block in request.blocks)
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
            leaving[flight.request.tracked] += len(flight.blocks) * (not flight.is_inbound)
        for direction in Direction:
            moving = [self.books.transfers.count_blocks(tier, direction) for tier in self.books.backups.slots]
            assert sum(moving) == sizes[direction]
        assert len(self.books.transfers) == len(self.flights)
        assert all(request.tracked.num_leaving == leaving[request.tracked] for request in self.requests)

    @invariant()
    def what_can_be_restored_is_there(self) -> None:
        for request in self.requests:
            tracked, num_tokens = request.tracked, self.books.count_restorable(request.tracked)
            assert num_tokens <= request.num_tokens
            known = tracked.known_backups
            for index, backup in enumerate(known[: -(-num_tokens // BLOCK_TOKENS)]):
                assert holds(self.slots[backup.location], request.text, index, num_tokens)
            assert tracked.num_leaving or all(backup.is_whole for backup in known), "what is kept can come back"

    def teardown(self) -> None:
        if hasattr(self, "books"):
            while self.requests:
                self._end(self.requests.pop())
            self.settle_all()
            assert all(block.ref_cnt == 0 for block in self.pool.blocks)
            assert self.books.backups.is_at_rest


class ContentMachine(BooksMachine):
    """Copies are found by content: requests of one text share them, and they stay for later ones, some of them pinned.

    A slot that was damaged is so for all that read it.
    """

    by_content = True

    @initialize(num_slots=st.sampled_from([0, 3, 9, 20]), num_blocks=st.sampled_from([5, 9, 20]))
    def begin(self, num_slots: int, num_blocks: int, num_requests: int = NUM_REQUESTS) -> None:
        super().begin(num_slots, num_blocks, num_requests)
        self.pins: list[Pin] = []
        self.num_adopted = 0

    @needs_a_request("off")
    @rule(index=INDEX, most_found=st.sampled_from([0, 0, 1, 4]), num_tokens=NUM_TOKENS)
    def come(self, index: int, most_found: int = 0, num_tokens: int = MAX_TOKENS) -> None:
        """As of the base class; a request without copies of its own first keeps those of its beginning."""
        request = self._pick(index, "off")
        had_kv, request.tracked.request.num_tokens = request.tracked.has_kv, request.num_tokens
        self.books.adopt(request.tracked)
        self.num_adopted += request.tracked.has_kv and not had_kv
        super().come(index, most_found, num_tokens)
        if request.where == "off" and not had_kv:
            self.books.forget(request.tracked)

    @needs_a_request("on")
    @rule(index=INDEX, worth=st.sampled_from([0.5, 1.0, 2.0]))
    def finish(self, index: int, worth: float = 1.0) -> None:
        """A request ends, and its session is expected to go on."""
        request = self._pick(index, "on")
        table = self.books.backups
        held = {pin: len(pin.keys) for pin in self.pins if pin.worth >= worth}
        pin = Pin(request.tracked.request.block_hashes[: request.num_computed // BLOCK_TOKENS], worth=worth)
        if pin.keys:
            table.pin(pin)
            self.pins.append(pin)
            self.books.save(request.tracked, request.blocks, pin)
            self._launch(request)
        assert {pin: len(pin.keys) for pin in held} == held, "a copy for a session took a slot of one worth as much"
        self.requests.remove(request)
        self._end(request)
        self._arrive()

    @precondition(lambda self: self.pins)
    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        self.books.backups.unpin(self.pins.pop(index % len(self.pins)))

    @needs_a_request("on")
    @rule(index=INDEX, most=st.integers(1, 3))
    def back_up(self, index: int, most: int) -> None:
        """As of the base class; a copy ahead of need takes no slot of a pin."""
        before = {pin: len(pin.keys) for pin in self.pins}
        super().back_up(index, most)
        assert {pin: len(pin.keys) for pin in self.pins} == before

    @rule(is_sure=st.sampled_from([False, False, True]))
    def reset(self, is_sure: bool = True) -> None:
        """As of the base class: the same tokens have other KV, and their keys are as before."""
        if is_sure:
            self.books.lose_contents()
        super().reset(is_sure)

    def _bring_in(self, flight: Flight, lost: frozenset[int]) -> None:
        damaged = [self.slots[location] is LOST for location in flight.transfer.locations]
        super()._bring_in(flight, lost | {place for place, is_damaged in enumerate(damaged) if is_damaged})

    @invariant()
    def what_is_found_by_content_is_there(self) -> None:
        for request in self.requests:
            for index, backup in enumerate(self.books.saved.find(request.tracked.request.block_hashes)):
                assert holds(self.slots[backup.location], request.text, index, MAX_TOKENS)
