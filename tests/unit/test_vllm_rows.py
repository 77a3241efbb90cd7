"""Rows of vLLM's requests for policies: the same as those of our own loop."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Link, SlotLedger, Tier
from floodplain.core.view import Demand, Prices, SequenceView, TierView
from floodplain.plugins.vllm.books import SwapBooks, Tables
from floodplain.plugins.vllm.prefix_index import Found
from floodplain.plugins.vllm.rows import Limits, RowMaker, sort_rows
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.sorted_queue import SortedQueue
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.tracked import TrackedRequest
from floodplain.plugins.vllm.views import Present, ViewMaker
from floodplain.runtime.prices import Links
from tests.support.vllm_books import Block, Pool

TOKENS, STEP, NEVER = 4, 100, 2**62
LIMITS = Limits(num_blocks=32, groups=(CacheGroup(TOKENS),), max_batched_tokens=64, max_num_seqs=8, max_model_len=64)


class World:
    """Fake ``Blocks``, with requests of ten prompt tokens that may generate twenty."""

    def __init__(self, num_slots: int = 16) -> None:
        self.pool, self.books = Pool(LIMITS.num_blocks), SwapBooks([SlotLedger(Tier.HOST, num_slots)], LIMITS.groups)
        self.books.bind(self.pool)
        self.by_request: dict[str, list[Block]] = {}
        self.by_content: dict[bytes, Block] = {}
        self.make = RowMaker(LIMITS, self, self.books, STEP)

    def count_free(self) -> int:
        return len(self.pool.free)

    def tables(self, request_id: str) -> Tables:
        return [self.by_request.get(request_id, ())]

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        return sum(block.ref_cnt == 1 for block in tables[0])

    def take_changed(self) -> Set[SeqId]:
        return frozenset()

    def find_prefix(self, seq_id: SeqId, request: Any, most: int) -> Found:
        hashes = request.block_hashes[:most]
        found = [self.by_content[content] for content in hashes if content in self.by_content]
        return Found(len(found), sum(block.ref_cnt > 0 for block in found))

    def watch_only(self, holding: Set[SeqId], absent: Set[SeqId]) -> None: ...

    def arrive(
        self, number: int = 0, *, num_output: int = 0, max_tokens: int = 20, priority: int = 0
    ) -> TrackedRequest:
        request = SimpleNamespace(
            request_id=f"request-{number}", num_prompt_tokens=10, num_tokens=10 + num_output, num_computed_tokens=0,
            num_output_placeholders=0, num_output_tokens=num_output, max_tokens=max_tokens, priority=priority,
            block_hashes=[b"%d" % index for index in range((10 + num_output) // TOKENS)],
            skip_reading_prefix_cache=False,
        )  # fmt: skip
        return TrackedRequest(SeqId(number), cast(Any, request), credit=0.5, arrival_s=float(number))

    def run(self, one: TrackedRequest, num_computed: int) -> list[Block]:
        """Put a request on the device with so many computed tokens."""
        blocks = self.by_request[one.request.request_id] = self.pool.give(-(-num_computed // TOKENS))
        one.request.num_computed_tokens = num_computed
        return blocks

    def send_away(self, one: TrackedRequest, *, swaps: bool = True) -> None:
        blocks = self.by_request.pop(one.request.request_id)
        if swaps:
            self.books.swap_out(one, [blocks], one.request.num_computed_tokens, Reason.SLICE_ENDED)
        else:
            self.books.forget(one)
        self.pool.free_blocks(blocks)
        one.request.num_computed_tokens = 0

    def settle(self, ok: bool = True) -> None:
        """End all copies; a failed copy loses all its blocks."""
        for transfer in self.books.take_due():
            self.books.settle(transfer.transfer_id, frozenset(() if ok else range(len(transfer.blocks))))

    def cache(self, num_blocks: int, num_held: int = 0) -> None:
        """Put leading blocks of the common content on the device; ``num_held`` of them are held."""
        given = self.pool.give(num_blocks)
        self.by_content = {b"%d" % index: block for index, block in enumerate(given)}
        self.pool.free_blocks(given[num_held:])


def absent_counts(row: SequenceView) -> tuple[int, int, int, int]:
    return (row.num_cached_tokens, row.num_shared_blocks, row.num_backed_blocks, row.num_restorable_tokens)


# -- on the device -----------------------------------------------------------------------------------------------------


@given(
    num_output=st.integers(1, 19),
    max_tokens=st.integers(20, 40),
    max_len=st.integers(30, 64),
    num_ahead=st.integers(0, 1),
)
def test_a_decoding_row_has_the_step_that_needs_a_block_and_its_end(
    num_output: int, max_tokens: int, max_len: int, num_ahead: int
) -> None:
    """A token that an outstanding step generates counts as known."""
    world = World()
    one = world.arrive(num_output=num_output, max_tokens=max_tokens)
    num_blocks, num_computed = len(world.run(one, 9 + num_output)), 9 + num_output
    cast(Any, one.request).num_tokens -= num_ahead
    cast(Any, one.request).num_output_placeholders = num_ahead
    limits = Limits(LIMITS.num_blocks, LIMITS.groups, 64, 8, max_model_len=max_len)
    row = RowMaker(limits, world, world.books, STEP).running(one)
    step, num_tokens, due_step = STEP, 10 + num_output, None
    while num_tokens < min(10 + max_tokens, max_len):  # as vLLM runs it from then on, one token in every step
        if due_step is None and num_computed == num_blocks * TOKENS:
            due_step = step
        step, num_tokens, num_computed = step + 1, num_tokens + 1, num_computed + 1
    assert row.end_step == step
    assert row.block_due_step == due_step or (due_step is None and row.block_due_step >= step)
    assert (row.status, row.is_decoding, row.num_scheduled) == (Status.RUNNING, True, 9 + num_output)
    assert (row.num_remaining, row.num_generated(STEP + 2)) == (1, num_output + 2)


@pytest.mark.parametrize("num_computed", [0, 4, 7, 8])
def test_a_prompt_in_chunks_has_its_remaining_tokens_and_no_step(num_computed: int) -> None:
    world = World()
    one = world.arrive()
    world.run(one, num_computed)
    row = world.make.running(one)
    assert (row.is_decoding, row.block_due_step, row.end_step) == (False, NEVER, NEVER)
    assert (row.num_remaining, row.num_blocks) == (10 - num_computed, -(-num_computed // TOKENS))


def test_a_request_whose_last_token_is_on_its_way_is_not_preempted() -> None:
    world = World()
    ones = [world.arrive(number, num_output=4) for number in range(2)]
    for one, num_ahead in zip(ones, (15, 16), strict=True):  # of 20 tokens
        world.run(one, 13 + num_ahead)
        cast(Any, one.request).num_output_placeholders = num_ahead
    controller = SwapController(PluginSettings(swap_bytes=800), 8, LIMITS.groups, num_workers=1)
    views = ViewMaker(LIMITS, world, controller, SortedQueue(controller.roster, lambda one: one.order_key, 4))
    held, gone = world.pool.give(3), world.pool.give(2)
    world.pool.touch(held[:1])
    present = Present(tuple(ones), deferred=(*held, *gone))
    demand = Demand(mean_output=7.0)
    view = views.view(STEP, present, is_open=True, prices=Prices(), demand=demand, completion_step=-1)
    assert view.demand is demand
    assert [row.end_step - STEP for row in view.running] == [1, 0] and view.outstanding == {1}
    assert view.num_draining_blocks == 4, "all that nothing but an outstanding step holds"


def test_the_queue_shows_the_first_requests_and_the_newest_others() -> None:
    world = World()
    ones = {one.request.request_id: one for one in (world.arrive(number) for number in range(5))}
    sorted_queue = SortedQueue(cast(Any, ones), lambda one: one.order_key, 2, 1)
    sorted_queue.refresh({name: one.request for name, one in ones.items()}, lambda request: True)
    assert [one.seq_id for one in sorted_queue.shown()] == [0, 1, 4]


def test_the_last_token_of_a_prompt_runs_as_any_token_does() -> None:
    world = World()
    one = world.arrive()
    world.run(one, 9)
    row = world.make.running(one)
    assert (row.is_decoding, row.block_due_step, row.end_step) == (True, STEP + 3, STEP + 20)


def test_blocks_that_others_or_copies_hold_are_not_its_own() -> None:
    world = World()
    one = world.arrive(num_output=8)
    blocks = world.run(one, 17)
    assert world.make.running(one).exclusive_blocks == 5
    world.pool.touch(blocks[:1])
    world.books.back_up(one, [blocks], 17, most=3, tier=Tier.HOST)
    row = world.make.running(one)
    assert (row.num_blocks, row.exclusive_blocks, row.num_backed_blocks) == (5, 2, 3)
    assert not row.is_leaving, "a running request is on the device, whatever is written behind"
    world.settle()
    assert world.make.running(one).exclusive_blocks == 4


def test_a_row_carries_what_ranks_its_request() -> None:
    world = World()
    one = world.arrive(3, num_output=2, priority=-1)
    one.entered_step = 42
    one.note_tokens(5.5)
    one.note_tokens(6.0)  # no new token
    cast(Any, one.request).num_output_tokens = 3
    one.note_tokens(7.25)
    cast(Any, one.request).num_output_tokens = 2
    row = world.make.absent(one)
    assert (row.seq_id, row.order_key, row.client, row.num_prompt) == (3, (-1, 3.0, 3), "", 10)
    assert (row.since_step, row.num_tokens, row.entered_step) == (STEP, 12, 42)
    assert (row.first_token_s, row.last_token_s, row.credit) == (5.5, 7.25, 0.5)


def test_only_what_is_found_on_the_first_admission_was_not_computed() -> None:
    one = World().arrive()
    cast(Any, one.request).num_preemptions = 0
    one.note_local(4)
    cast(Any, one.request).num_preemptions = 1
    one.note_local(8)
    assert (one.num_cached_tokens, one.num_local_tokens) == (4, 8)


def test_rows_stand_in_order_of_priority_then_arrival() -> None:
    world = World()
    rows = [world.make.absent(world.arrive(number, priority=priority)) for number, priority in enumerate([1, 0, 0, -1])]
    assert [row.seq_id for row in sort_rows(reversed(rows))] == [3, 1, 2, 0]


# -- off the device ----------------------------------------------------------------------------------------------------


def test_a_newcomer_waits_and_has_nothing() -> None:
    world = World()
    row = world.make.absent(world.arrive())
    assert (row.status, row.is_leaving, row.num_blocks) == (Status.WAITING, False, 0)
    assert (row.num_remaining, row.is_decoding, absent_counts(row)) == (10, False, (0, 0, 0, 0))


@pytest.mark.parametrize(("num_cached", "num_held"), [(1, 0), (2, 1), (3, 3)])
def test_a_prefix_that_is_on_the_device_counts_with_its_holders(num_cached: int, num_held: int) -> None:
    world = World()
    world.cache(num_cached, num_held)
    row = world.make.absent(world.arrive(num_output=8))
    assert row.status is Status.WAITING
    assert absent_counts(row) == (4 * num_cached, num_held, 0, 0)


def test_the_last_token_is_computed_even_if_all_of_it_is_on_the_device() -> None:
    world = World()
    world.cache(3, num_held=3)
    row = world.make.absent(world.arrive(num_output=2))  # twelve tokens: three full blocks
    assert absent_counts(row) == (8, 2, 0, 0)


def test_a_victim_is_swapped_at_once_and_resumable_after_its_copies() -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one)
    row = world.make.absent(one)
    assert (row.status, row.is_leaving, absent_counts(row)) == (Status.SWAPPED, True, (0, 0, 0, 0))
    assert world.books.num_draining_blocks == 4
    world.settle()
    row = world.make.absent(one)
    assert (row.status, row.is_leaving, absent_counts(row)) == (Status.SWAPPED, False, (0, 0, 4, 13))


def test_blocks_written_behind_are_restorable_while_the_rest_is_copied() -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.books.back_up(one, [world.run(one, 13)], 13, most=2, tier=Tier.HOST)
    world.settle()
    world.send_away(one)
    row = world.make.absent(one)
    assert (row.status, row.is_leaving, absent_counts(row)) == (Status.SWAPPED, True, (0, 0, 2, 8))


@pytest.mark.parametrize(("num_cached", "counts"), [(1, (4, 1, 3, 13)), (3, (12, 1, 1, 13))])
def test_a_swapped_request_needs_no_copy_of_blocks_on_the_device(num_cached: int, counts: tuple[int, ...]) -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one)
    world.settle()
    world.cache(num_cached, num_held=1)
    assert absent_counts(world.make.absent(one)) == counts


def test_what_is_on_the_device_beyond_the_copies_counts_as_restorable() -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.books.back_up(one, [world.run(one, 13)], 13, most=1, tier=Tier.HOST)
    world.settle()
    world.send_away(one)
    world.settle(ok=False)
    world.cache(3)
    assert absent_counts(world.make.absent(one)) == (12, 0, 0, 12)


@pytest.mark.parametrize("num_slots", [0, 16])
def test_a_request_to_be_recomputed_waits(num_slots: int) -> None:
    world = World(num_slots)
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one, swaps=num_slots == 0)  # without slots, that is the same
    row = world.make.absent(one)
    assert (row.status, row.is_leaving, absent_counts(row)) == (Status.WAITING, False, (0, 0, 0, 0))
    assert (row.num_remaining, row.num_generated(STEP)) == (14, 4)


def test_a_copy_that_is_not_whole_leaves_it_waiting() -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one)
    world.settle(ok=False)
    assert world.make.absent(one).status is Status.WAITING


def test_a_loading_request_holds_its_blocks() -> None:
    world = World()
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one)
    world.settle()
    world.books.fetch(one, [world.run(one, 13)], 0, 13)
    row = world.make.loading(one)
    assert (row.status, row.num_blocks, row.num_backed_blocks, row.is_leaving) == (Status.LOADING, 4, 3, False)
    assert (row.is_decoding, row.num_scheduled, row.num_generated(STEP)) == (False, 0, 4)


# -- swap space --------------------------------------------------------------------------------------------------------


def test_swap_space_is_seen_with_what_its_link_costs() -> None:
    world = World(num_slots=6)
    one = world.arrive(num_output=4)
    world.run(one, 13)
    world.send_away(one)
    links = Links([Link(Tier.HOST, bandwidth=1000.0, latency_s=0.25)], 500)
    assert links.view_tiers(world.books.transfers) == (TierView(Tier.HOST, 2, 6, 0.5, 0.25, 4, 0),)
    world.settle()
    world.books.fetch(one, [world.run(one, 13)], 4, 13)
    assert links.view_tiers(world.books.transfers) == (TierView(Tier.HOST, 2, 6, 0.5, 0.25, 0, 3),)
    assert links.view_tiers(World(num_slots=0).books.transfers) == ()


# -- groups of layers --------------------------------------------------------------------------------------------------

NULL = Block(-1, is_null=True)
GROUPS = (CacheGroup(4), CacheGroup(2, CacheKind.WINDOW, 4), CacheGroup(4, CacheKind.STATE, 2))


class GroupedWorld(World):
    """Of a request of 17 tokens: five blocks of all tokens, a window of three, and a state behind a gap."""

    def __init__(self) -> None:
        super().__init__()
        self.books = SwapBooks([SlotLedger(Tier.HOST, 16)], GROUPS)
        self.make = RowMaker(replace(LIMITS, groups=GROUPS), self, self.books, STEP)
        self.grouped = [self.pool.give(5), [NULL] * 6 + self.pool.give(3), [NULL, *self.pool.give(1), NULL, NULL]]
        self.grouped[2] += self.pool.give(1)

    def tables(self, request_id: str) -> Tables:
        return self.grouped


def test_a_row_counts_blocks_of_all_groups_without_the_null_block() -> None:
    world = GroupedWorld()
    one = world.arrive(num_output=8)
    one.request.num_computed_tokens = 17
    assert world.make.running(one).num_blocks == world.make.loading(one).num_blocks == 5 + 3 + 2


def test_a_row_is_due_for_a_block_when_its_first_group_is() -> None:
    """The window's table is full after 18 tokens, the others after 20."""
    world = GroupedWorld()
    one = world.arrive(num_output=8)
    one.request.num_computed_tokens = 17
    assert world.make.running(one).block_due_step == STEP + 1


def test_a_state_cannot_be_restored_for_fewer_tokens_than_it_is_for() -> None:
    world = GroupedWorld()
    world.books.bind(world.pool)
    one = world.arrive(num_output=8)
    assert world.books.swap_out(one, world.grouped, 17, Reason.SLICE_ENDED)
    world.settle()
    assert [world.books.count_restorable(one, most) for most in (None, 18, 17, 16)] == [17, 17, 17, 0]
    windows = SwapBooks([SlotLedger(Tier.HOST, 16)], GROUPS[:2])
    windows.bind(world.pool)
    two = world.arrive(1, num_output=8)
    assert windows.swap_out(two, world.grouped[:2], 17, Reason.SLICE_ENDED)
    for transfer in windows.take_due():
        windows.settle(transfer.transfer_id, frozenset())
    assert [windows.count_restorable(two, most) for most in (None, 16)] == [17, 16]


def test_tokens_are_counted_over_several_answers_of_a_request() -> None:
    one = World().arrive(0)
    request = cast(Any, one.request)
    for number, work, more in ((3, 3, 3), (4, 4, 1), (4, 4, 0), (2, 6, 2), (5, 9, 3), (0, 9, 0), (1, 10, 1)):
        request.num_output_tokens = number
        assert (one.note_tokens(1.0), one.account.work) == (more, 0.5 + work)
