"""The plug-in keeps KV of ended requests for their sessions: what is copied, found, shared out and given up."""

from __future__ import annotations

from typing import Any, cast

import pytest

from floodplain.core.plan import Reason
from floodplain.core.tiers import Tier
from tests.support.vllm_books import BLOCK_TOKENS
from tests.support.vllm_sessions import BLOCK_BYTES, Office


def test_whole_blocks_are_copied_once_and_found_by_what_begins_alike() -> None:
    office = Office()
    assert office.serve("a", 4 * BLOCK_TOKENS + 2, 0.0) == [4]
    assert office.pool.free and all(block.ref_cnt == 0 for block in office.pool.blocks)
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == 4
    assert office.count_saved("a", 4 * BLOCK_TOKENS) == 3, "the last token is computed again"
    assert office.count_saved("b", 6 * BLOCK_TOKENS) == 0
    assert office.serve("a", 6 * BLOCK_TOKENS, 1.0) == [2], "only what is new"


def test_copies_ahead_of_need_are_kept_and_not_made_again() -> None:
    office = Office()
    one = office.arrive("a", 4 * BLOCK_TOKENS, 0.0)
    blocks = office.compute(one, 0.0)
    office.books.back_up(one, [blocks], one.num_verified_tokens, 3, Tier.HOST)
    assert office.copy() == [3]
    assert office.end(one, blocks, 1.0) == [1]
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == 4


def test_a_prefix_in_swap_space_is_restored_and_then_kept_for_its_request() -> None:
    office = Office()
    office.serve("a", 4 * BLOCK_TOKENS, 0.0)
    one = office.arrive("a", 6 * BLOCK_TOKENS, 1.0)
    office.books.adopt(one)
    table = office.pool.give(6)
    assert office.books.count_restorable(one, one.request.num_tokens - 1) == 4 * BLOCK_TOKENS
    office.books.fetch(one, [table], BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    assert office.books.num_adopted_tokens == 3 * BLOCK_TOKENS
    assert [transfer.reason for transfer in office.books._due] == [Reason.PREFIX_IN_SWAP]
    assert office.copy() == [3]
    cast(Any, one.request).num_computed_tokens = 6 * BLOCK_TOKENS
    assert office.books.swap_out(one, [table], 6 * BLOCK_TOKENS, Reason.SLICE_ENDED)
    assert office.copy() == [2], "of four of its blocks there is a copy"
    assert office.books.count_saved(one, 5) == 0, "what it has itself is not found by content"
    office.books.fetch(one, [office.pool.give(6)], 0, 6 * BLOCK_TOKENS)
    assert [transfer.reason for transfer in office.books._due] == [Reason.SLICE_BEGINS]
    assert office.copy() == [6] and office.books.num_adopted_tokens == 3 * BLOCK_TOKENS


def test_a_damaged_copy_is_found_no_more() -> None:
    office = Office()
    office.serve("a", 4 * BLOCK_TOKENS, 0.0)
    one = office.arrive("a", 6 * BLOCK_TOKENS, 1.0)
    office.books.adopt(one)
    office.books.fetch(one, [office.pool.give(6)], 0, 4 * BLOCK_TOKENS)
    [transfer] = office.books.take_due()
    office.books.settle(transfer.transfer_id, frozenset({2}))
    assert not one.has_kv, "it waits, and is not taken for one that was swapped out"
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == 2


def test_a_tenant_pins_its_part_of_the_slots_and_finds_nothing_of_others() -> None:
    office = Office(num_slots=8)
    office.serve("a", 6 * BLOCK_TOKENS, 0.0, salt="one")
    assert office.count_saved("a", 8 * BLOCK_TOKENS, salt="two") == 0
    office.serve("b", 4 * BLOCK_TOKENS, 0.5, salt="two")
    idle = office.books.backups.idle
    assert {pin.tenant: len(pin.keys) for pin in idle.pins} == {"one": 4, "two": 4}
    assert office.count_saved("b", 6 * BLOCK_TOKENS, salt="two") == 4


def test_a_session_takes_slots_of_those_that_are_worth_less() -> None:
    office = Office(num_slots=4)
    office.serve("a", 4 * BLOCK_TOKENS, 0.0)
    assert office.serve("b", 4 * BLOCK_TOKENS, 0.0) == [], "the other one is worth as much"
    office.sessions.book.advance(60.0)
    assert office.serve("c", 3 * BLOCK_TOKENS, 60.0) == [3]
    assert [office.count_saved(text, 6 * BLOCK_TOKENS) for text in "abc"] == [1, 0, 3]


def test_live_requests_take_any_slot_and_copies_ahead_of_need_do_not() -> None:
    office = Office(num_slots=6)
    office.serve("a", 5 * BLOCK_TOKENS, 0.0)
    one = office.arrive("b", 4 * BLOCK_TOKENS, 1.0)
    blocks = office.compute(one, 1.0)
    office.books.back_up(one, [blocks], one.num_verified_tokens, 4, Tier.HOST)
    assert office.copy() == [1], "the slot that nothing is pinned in"
    assert office.books.swap_out(one, [blocks], 4 * BLOCK_TOKENS, Reason.SLICE_ENDED)
    assert office.copy() == [3]
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == 2, "the first blocks stay"


def test_requests_with_the_same_contents_leave_one_copy_of_each() -> None:
    office = Office()
    ones = [office.arrive("a", 4 * BLOCK_TOKENS, 0.0) for _ in range(3)]
    tables = [office.compute(one, 0.0) for one in ones]
    for one, table in zip(ones[:2], tables[:2], strict=True):
        assert office.books.swap_out(one, [table], 4 * BLOCK_TOKENS, Reason.SLICE_ENDED)
    assert office.copy() == [4, 4], "the first copy is not whole yet"
    assert office.books.swap_out(ones[2], [tables[2]], 4 * BLOCK_TOKENS, Reason.SLICE_ENDED)
    assert office.copy() == []
    for one, table in zip(ones, tables, strict=True):
        office.abort(one, table)
    assert office.books.backups.slots[Tier.HOST].num_taken == 4


def test_of_unpinned_copies_the_first_blocks_stay_longest() -> None:
    office = Office(num_slots=4)
    for text, num_blocks in (("a", 4), ("b", 1)):
        one = office.arrive(text, num_blocks * BLOCK_TOKENS, 0.0)
        table = office.compute(one, 0.0)
        assert office.books.swap_out(one, [table], num_blocks * BLOCK_TOKENS, Reason.SLICE_ENDED)
        office.copy()
        office.abort(one, table)
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == 3


def test_what_is_not_expected_to_be_used_is_not_copied() -> None:
    office = Office()
    one = office.arrive("a", 4 * BLOCK_TOKENS, 0.0)
    assert office.end(one, office.compute(one, 0.0), 0.1, least_chance=1.0) == []
    aborted = office.arrive("b", 4 * BLOCK_TOKENS, 0.0)
    office.sessions.give_up(aborted)
    assert office.count_saved("b", 6 * BLOCK_TOKENS) == 0


def test_requests_that_read_no_cached_prefix_find_none() -> None:
    office = Office()
    office.serve("a", 4 * BLOCK_TOKENS, 0.0)
    one = office.arrive("a", 6 * BLOCK_TOKENS, 1.0)
    cast(Any, one.request).skip_reading_prefix_cache = True
    office.books.take_changed()
    assert office.books.count_saved(one, 5) == 0


def test_other_weights_leave_nothing_to_restore_and_no_pin() -> None:
    office = Office()
    office.serve("a", 4 * BLOCK_TOKENS, 0.0)
    one = office.arrive("c", 4 * BLOCK_TOKENS, 0.5)
    office.sessions.end(one, office.compute(one, 0.5), 0.6, 0.0)  # its copy is under way
    office.controller.void_all()
    office.copy()
    assert not office.books.backups.idle.pins and office.books.backups.slots[Tier.HOST].num_taken == 0
    assert office.count_saved("a", 6 * BLOCK_TOKENS) == office.count_saved("c", 6 * BLOCK_TOKENS) == 0


@pytest.mark.parametrize("name", ["agent", None])
def test_returns_and_pinned_bytes_are_counted(name: str | None) -> None:
    office = Office()
    office.serve("a", 4 * BLOCK_TOKENS, 0.0, name=name)
    office.serve("a", 6 * BLOCK_TOKENS, 1.0, name=name)
    office.sessions.record(office.controller.tally, BLOCK_BYTES)
    office.sessions.record(office.controller.tally, BLOCK_BYTES)
    told = office.controller.tally.take()
    assert told["counts"] == {"session_returns_total pinned": 1}
    assert told["gauges"] == {"swap_pinned_bytes host": 6 * BLOCK_BYTES}
