"""Swap-out and swap-in of sequences: copied blocks, computed tokens, failed copies, and what views show of backups."""

from __future__ import annotations

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.plan import BackupOrder, Decision, Reason, StepPlan, TransferKind
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from tests.support.driver import Driver, computed
from tests.support.swap_choices import FIRST, SECOND, back_up, choose, idle, make_driver, plan, resume, start, swap_out


def test_a_swapped_in_sequence_computes_exactly_one_token() -> None:
    driver = make_driver()
    seq_id = start(driver)
    driver.step()  # 11 computed: two full blocks of 4, and 3 in the tail
    [out] = plan(driver, swap_out(seq_id)).transfers
    assert (out.kind, len(out.blocks), out.reason) == (TransferKind.SWAP_OUT, 3, Reason.SLICE_ENDED)
    driver.settle()
    driver.evict_everything()
    [back] = plan(driver, resume(seq_id)).transfers
    assert (back.kind, back.locations) == (TransferKind.SWAP_IN, out.locations)
    assert driver.seq(seq_id).status is Status.LOADING
    driver.settle()
    assert computed(driver.step()) == {seq_id: 1}
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 0
    assert driver.loop.counters.preemptions == {"recompute": 0, "swap": 1}


def test_blocks_that_are_full_and_backed_up_are_swapped_out_without_a_copy() -> None:
    driver = make_driver()
    other = start(driver, range(60, 61))
    seq_id = start(driver, range(8))
    plan(driver, lambda view: Decision(backups=(BackupOrder(seq_id, 2, Tier.HOST),)))
    driver.settle()
    made = plan(driver, swap_out(seq_id))
    assert (made.decodes, made.transfers) == ((other,), ())
    assert driver.loop.state.ledger.num_available == 15
    choose(driver, resume(seq_id))
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 0


def test_a_backup_takes_no_block_that_is_not_full_of_computed_tokens() -> None:
    driver = make_driver(depth=2)
    seq_id = driver.submit(range(7), max_tokens=9, ignore_eos=True)
    driver.step()
    driver.plan()  # computes position 7, which fills the second block, but is not complete
    choose(driver, back_up(seq_id))
    made = driver.plan()
    assert isinstance(made, StepPlan)
    assert [len(t.blocks) for t in made.transfers] == [1]
    driver.run()


def test_a_swapped_in_tail_loses_its_backup_and_is_copied_anew() -> None:
    driver = make_driver()
    seq_id = start(driver)
    for _ in range(2):
        assert [len(t.blocks) for t in plan(driver, swap_out(seq_id)).transfers] in ([3], [1])
        driver.settle()
        driver.evict_everything()
        plan(driver, resume(seq_id))
        driver.settle()
        driver.step()
    assert driver.loop.state.backups.num_available(Tier.HOST) == 14  # two full blocks stay backed up, no tail does
    driver.run()


def test_blocks_that_are_still_on_the_device_are_not_copied_back() -> None:
    driver = make_driver()
    seq_id = start(driver)
    plan(driver, swap_out(seq_id))
    driver.settle()
    [back] = plan(driver, resume(seq_id)).transfers
    assert len(back.blocks) == 1  # the tail: it is never shared
    driver.run()


def test_a_prefix_of_two_sequences_is_backed_up_once() -> None:
    driver = make_driver()
    for _ in range(2):
        driver.submit(range(10), max_tokens=12, ignore_eos=True)
        driver.step()
    assert [len(t.blocks) for t in plan(driver, back_up(FIRST)).transfers] == [2]
    choose(driver, back_up(SECOND))
    driver.plan()
    assert len(driver.executor.transfers) == 1
    driver.settle()
    assert driver.seq(SECOND).backups == driver.seq(FIRST).backups
    driver.loop.finish(FIRST, FinishReason.ABORT, driver.now)
    assert driver.loop.state.backups.num_available(Tier.HOST) == 14
    driver.run()


def test_a_failed_swap_in_recomputes_and_is_not_tried_for_ever() -> None:
    driver = make_driver()
    seq_id = start(driver)
    plan(driver, swap_out(seq_id))
    driver.settle()
    driver.evict_everything()
    plan(driver, resume(seq_id))
    driver.settle(ok=False)
    assert driver.seq(seq_id).status is Status.WAITING
    assert driver.loop.state.backups.num_available(Tier.HOST) == 16
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 10
    assert driver.loop.counters.num_failed_transfers == 1


def test_resuming_before_the_copy_out_arrived_uses_only_what_is_whole() -> None:
    driver = make_driver(num_blocks=4, max_model_len=16)
    seq_id = start(driver, range(6), 8)
    plan(driver, swap_out(seq_id))
    assert driver.loop.state.ledger.num_available == 2  # the copy still reads two blocks
    choose(driver, resume(seq_id))
    made = driver.plan()
    assert isinstance(made, StepPlan)
    assert made.transfers == ()
    assert computed(made) == {seq_id: 3}  # four tokens are still there by content, the other three are not
    driver.run()


def test_a_request_aborted_while_its_blocks_move_frees_everything() -> None:
    for settles_out_first in (True, False):
        driver = make_driver()
        seq_id = start(driver)
        plan(driver, swap_out(seq_id))
        if settles_out_first:
            driver.settle()
            driver.evict_everything()
            plan(driver, resume(seq_id))
        driver.loop.finish(seq_id, FinishReason.ABORT, driver.now)
        assert driver.loop.has_unfinished
        driver.settle()
        assert not driver.loop.has_unfinished
        driver.check_at_rest()


def test_a_swap_without_room_in_the_tier_is_a_broken_invariant() -> None:
    driver = make_driver(num_slots=2)
    seq_id = start(driver)
    choose(driver, swap_out(seq_id))
    with pytest.raises(InvariantError, match="fewer slots"):
        driver.plan()


def test_a_swapped_sequence_that_is_never_resumed_is_an_error() -> None:
    driver = make_driver()
    plan(driver, swap_out(start(driver)))
    driver.settle()
    with pytest.raises(InvariantError, match="runs nothing while requests are alive"):
        driver.plan()


# -- blocks that move under a loop -----------------------------------------------------------------------------------


def test_a_running_sequence_follows_its_blocks_when_the_pool_shrinks() -> None:
    driver = make_driver()
    first, second, third = (start(driver, range(k, k + 2)) for k in (0, 10, 20))
    driver.loop.finish(first, FinishReason.ABORT, driver.now)
    [destination] = driver.shrink().values()
    mover = second if driver.seq(second).blocks == [destination] else third
    made = driver.step()
    assert [(t.seq_id, t.start, t.blocks) for t in made.tables] == [(mover, 0, (destination,))]
    driver.grow_back()
    driver.run()


def test_a_shared_prefix_may_move_while_the_rest_of_a_sequence_loads() -> None:
    """The loading sequence refers to blocks that no copy touches: it must follow their moves, too."""
    driver = make_driver()
    filler = start(driver, range(40, 56), 8)
    first = start(driver)
    second = driver.submit(range(10), max_tokens=12, ignore_eos=True)
    driver.step()
    plan(driver, swap_out(second))
    driver.settle()
    plan(driver, resume(second))
    assert driver.seq(second).status is Status.LOADING
    prefix = driver.seq(first).blocks[:2]
    driver.loop.finish(filler, FinishReason.ABORT, driver.now)
    moved = driver.shrink()
    assert set(prefix) & set(moved), "the test is void: the prefix did not move"
    driver.settle()
    assert driver.seq(second).blocks[:2] == [moved.get(b, b) for b in prefix]
    driver.grow_back()
    driver.run()


# -- negative controls -----------------------------------------------------------------------------------------------


def test_a_slot_that_is_corrupted_shows_in_the_tokens() -> None:
    driver = make_driver()
    seq_id = start(driver)
    plan(driver, swap_out(seq_id))
    driver.settle()
    for content in driver.executor.slots.values():
        content[0] = (content[0][0], content[0][1] + 1)
    driver.evict_everything()
    plan(driver, resume(seq_id))
    with pytest.raises(AssertionError):
        driver.run()


# -- backups in a view, including those that other sequences wrote or lost ---------------------------------------------


def shown_backups(driver: Driver) -> dict[SeqId, int]:
    driver.step()
    view = driver.loop.policy.views[-1]  # type: ignore[attr-defined]
    return {row.seq_id: row.num_backed_blocks for row in view.running}


def test_a_view_counts_backups_that_another_sequence_wrote() -> None:
    driver = make_driver()
    for _ in range(2):
        driver.submit(range(10), max_tokens=12, ignore_eos=True)
        driver.step()
    plan(driver, back_up(FIRST))
    driver.settle()
    plan(driver, back_up(SECOND))
    assert shown_backups(driver) == {FIRST: 2, SECOND: 2}


def test_a_view_drops_backups_lost_by_a_failed_restore_of_another_sequence() -> None:
    """Each holds the content in its own blocks: neither had sealed it when the other began."""
    driver = make_driver(max_batched_tokens=64)
    for _ in range(2):
        driver.submit(range(10), max_tokens=12, ignore_eos=True)
    driver.step()
    assert not set(driver.seq(FIRST).blocks) & set(driver.seq(SECOND).blocks)
    plan(driver, back_up(SECOND))
    driver.settle()
    plan(driver, swap_out(FIRST))  # frees the indexed copy of the prefix ...
    driver.settle()
    driver.evict_everything()
    assert shown_backups(driver) == {SECOND: 2}
    plan(driver, resume(FIRST))  # ... so that it loads from the backups that the other one keeps
    driver.step()
    driver.settle(ok=False)
    assert driver.seq(SECOND).backups == []
    assert shown_backups(driver) == {SECOND: 0}


def test_a_view_counts_exclusive_blocks_anew_after_a_swap_in() -> None:
    """It had its own blocks and resumes on blocks that a copy still reads: preempting it frees none."""
    driver = make_driver(max_batched_tokens=64)
    for _ in range(2):
        driver.submit(range(8), max_tokens=12, ignore_eos=True)
    driver.step()
    plan(driver, swap_out(FIRST))  # its blocks drain
    choose(driver, swap_out(SECOND), resume(SECOND), idle)
    driver.plan()
    [row] = driver.loop.policy.views[-1].running  # type: ignore[attr-defined]
    assert (row.seq_id, row.num_blocks, row.exclusive_blocks) == (SECOND, 2, 0)
    driver.settle()
    choose(driver, resume(FIRST))
    driver.run()


def test_backups_of_blocks_to_recompute_do_not_count_for_resident_blocks() -> None:
    """The first backup is lost, so the second is no help; a policy that counts it would run out of slots."""
    driver = make_driver(max_batched_tokens=4)
    seq_id = driver.submit(range(10), max_tokens=12, ignore_eos=True)
    while not driver.seq(seq_id).is_decoding:
        driver.step()
    plan(driver, back_up(seq_id, 1))
    plan(driver, swap_out(seq_id))
    lost, tail = driver.executor.transfers
    assert (len(lost.blocks), len(tail.blocks)) == (1, 2)
    driver.executor.transfers = [tail, lost]
    driver.settle()
    driver.settle(ok=False)
    driver.evict_everything()
    choose(driver, resume(seq_id))
    driver.step()
    assert driver.seq(seq_id).num_computed == 4
    assert shown_backups(driver) == {seq_id: 0}
    assert (
        len(plan(driver, swap_out(seq_id)).transfers[0].blocks) == 1
    )  # the tail: the second block's backup counts again
    driver.settle()
    choose(driver, resume(seq_id))
    driver.run()


def test_a_view_counts_what_a_resumption_of_an_absent_sequence_copies() -> None:
    driver = make_driver()
    seq_id = start(driver)
    driver.step()
    plan(driver, swap_out(seq_id))
    driver.settle()

    def backed() -> int:
        driver.submit([60], max_tokens=1, ignore_eos=True)
        driver.step()
        [row] = driver.loop.policy.views[-1].swapped  # type: ignore[attr-defined]
        return row.num_backed_blocks

    assert backed() == 1  # its tail: its two full blocks are cached on the device
    driver.evict_everything()
    assert backed() == 3


def test_full_blocks_of_a_loading_sequence_are_backed_up_already() -> None:
    """Otherwise a policy would reserve slots twice for a request that is preempted again."""
    driver = make_driver()
    seq_id = start(driver)
    driver.step()
    plan(driver, swap_out(seq_id))
    driver.settle()
    driver.evict_everything()
    plan(driver, resume(seq_id))
    driver.submit([60], max_tokens=1, ignore_eos=True)
    seen: list[View] = []
    choose(driver, lambda view: seen.append(view) or idle(view))
    driver.plan()
    [row] = seen[0].loading
    assert (row.num_blocks, row.num_backed_blocks) == (3, 2)  # and its tail, whose backup is freed when it arrives
    driver.settle()
    driver.run()
