"""A copy loses only its lost blocks: blocks before the first one are restored, and no token is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from tests.support.driver import Driver
from tests.support.examples import examples
from tests.support.swap_choices import back_up, choose, make_driver, plan, resume, start, swap_out

BLOCK_TOKENS = 4
NUM_TOKENS = 18
"""Tokens computed when the sequence is swapped out: four full blocks, and two tokens in the tail."""
NUM_BLOCKS = 5
LOST = st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1).map(sorted)


def begin() -> tuple[Driver, SeqId]:
    driver = make_driver(max_batched_tokens=32, max_model_len=32)
    return driver, start(driver, range(NUM_TOKENS), max_tokens=8)


def leave(driver: Driver, seq_id: SeqId, lost: list[int] | None = None) -> None:
    """Swap a sequence out, and evict its blocks on the device."""
    [out] = plan(driver, swap_out(seq_id)).transfers
    assert len(out.blocks) == NUM_BLOCKS
    driver.settle(lost=lost or [])
    driver.evict_everything()


@settings(max_examples=examples(40))
@given(lost=LOST)
def test_a_restore_keeps_exactly_what_stands_before_the_first_lost_block(lost: list[int]) -> None:
    driver, seq_id = begin()
    leave(driver, seq_id)
    backups = [*driver.seq(seq_id).backups, driver.seq(seq_id).tail[0]]  # type: ignore[index]
    [back] = plan(driver, resume(seq_id)).transfers
    assert len(back.blocks) == NUM_BLOCKS
    driver.settle(lost=lost)
    assert [backup.is_lost for backup in backups[:-1]] == [place in lost for place in range(NUM_BLOCKS - 1)]
    seq = driver.seq(seq_id)
    if lost[0]:
        assert (seq.status, seq.num_computed) == (Status.RUNNING, lost[0] * BLOCK_TOKENS)
        assert seq.backups == backups[: lost[0]]
    else:
        assert seq.status is (Status.WAITING if len(lost) == NUM_BLOCKS else Status.SWAPPED)
    if seq.status is Status.SWAPPED:
        choose(driver, resume(seq_id))
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == NUM_TOKENS - lost[0] * BLOCK_TOKENS
    assert driver.loop.counters.num_failed_transfers == 1


@settings(max_examples=examples(20))
@given(lost=LOST)
def test_of_a_swap_out_each_whole_block_is_kept(lost: list[int]) -> None:
    driver, seq_id = begin()
    leave(driver, seq_id, lost)
    num_whole = NUM_BLOCKS - len(lost)
    assert driver.loop.state.backups.slots[Tier.HOST].num_taken == num_whole
    if num_whole:
        transfers = plan(driver, resume(seq_id)).transfers if lost[0] else ()
        assert sum(len(back.blocks) for back in transfers) == lost[0], "what follows is of no use"
    if driver.seq(seq_id).status is Status.SWAPPED:
        choose(driver, resume(seq_id))
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == NUM_TOKENS - lost[0] * BLOCK_TOKENS


@settings(max_examples=examples(20))
@given(lost=st.sets(st.integers(0, NUM_BLOCKS - 2), min_size=1).map(sorted))
def test_of_a_backup_only_the_lost_blocks_are_written_again(lost: list[int]) -> None:
    driver, seq_id = begin()
    [first] = plan(driver, back_up(seq_id)).transfers
    driver.settle(lost=lost)
    [second] = plan(driver, back_up(seq_id)).transfers
    assert second.blocks == tuple(first.blocks[place] for place in lost)
    driver.settle()
    plan(driver, swap_out(seq_id))
    driver.settle()
    driver.evict_everything()
    plan(driver, resume(seq_id))
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("place", range(2))
def test_a_prefix_that_is_fetched_ends_before_the_lost_block(place: int) -> None:
    """A waiting sequence starts with the fetched part of the prefix."""
    driver, first = begin()
    leave(driver, first)
    second = driver.submit(range(NUM_TOKENS - 1), max_tokens=2, ignore_eos=True)
    plan(driver, resume(second))
    driver.settle(lost=[place])
    seq = driver.seq(second)
    assert (seq.status, seq.num_computed) == ((Status.RUNNING, BLOCK_TOKENS) if place else (Status.WAITING, 0))
    choose(driver, resume(first))
    driver.run()
