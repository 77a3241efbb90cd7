"""Sequences that leave for swap space and come back: what is copied, what is computed, what a failed copy does."""

from __future__ import annotations

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.plan import (
    BackupOrder,
    Decision,
    Preemption,
    PreemptionMode,
    Reason,
    Resumption,
    StepPlan,
    TransferKind,
)
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from tests.support.driver import Choice, Driver, ScriptedPolicy, computed
from tests.support.loops import make_loop

FIRST, SECOND = SeqId(0), SeqId(1)


def make_driver(num_blocks: int = 16, num_slots: int = 16, **kwargs: object) -> Driver:
    policy = ScriptedPolicy()
    return Driver(make_loop(policy=policy, num_blocks=num_blocks, num_slots=num_slots, **kwargs))  # type: ignore[arg-type]


def choose(driver: Driver, *choices: Choice) -> None:
    """What the policy decides next, instead of FCFS."""
    driver.loop.policy.script.extend(choices)  # type: ignore[attr-defined]


def swap_out(seq_id: SeqId) -> Choice:
    order = Preemption(seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
    return lambda view: Decision(preemptions=(order,), wake_s=1e9)


def decoding(view: View) -> tuple[SeqId, ...]:
    return tuple(row.seq_id for row in view.running if row.is_decoding)


def resume(seq_id: SeqId) -> Choice:
    order = Resumption(seq_id, Reason.SLICE_BEGINS)
    return lambda view: Decision(decodes=decoding(view), resumptions=(order,), wake_s=1e9)


def back_up(seq_id: SeqId, num_blocks: int = 99) -> Choice:
    """Beside the decoding of everybody, as a policy does it."""
    order = BackupOrder(seq_id, num_blocks, Tier.HOST)
    return lambda view: Decision(decodes=decoding(view), backups=(order,))


def idle(view: View) -> Decision:
    return Decision(wake_s=1e9)


def start(driver: Driver, prompt: range = range(10), max_tokens: int = 12) -> SeqId:
    seq_id = driver.submit(prompt, max_tokens=max_tokens, ignore_eos=True)
    driver.step()
    return seq_id


def plan(driver: Driver, *choices: Choice) -> StepPlan:
    choose(driver, *choices)
    made = driver.plan()
    assert isinstance(made, StepPlan)
    driver.complete()
    return made


def test_a_sequence_that_comes_back_computes_exactly_one_token() -> None:
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


def test_on_its_way_back_its_full_blocks_are_backed_up_already() -> None:
    """Else a policy would set slots aside twice for who comes and must leave again."""
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
    assert (row.num_blocks, row.num_backed_blocks) == (3, 2)  # and its tail, which dies when it arrives
    driver.settle()
    driver.run()


def test_after_a_backup_the_switch_copies_only_the_tail() -> None:
    driver = make_driver()
    seq_id = start(driver)
    [written] = plan(driver, back_up(seq_id)).transfers
    assert (written.kind, len(written.blocks)) == (TransferKind.BACKUP, 2)
    driver.settle()
    [out] = plan(driver, swap_out(seq_id)).transfers
    assert len(out.blocks) == 1
    driver.settle()
    driver.evict_everything()
    assert len(plan(driver, resume(seq_id)).transfers[0].blocks) == 3
    driver.run()


def test_what_is_full_and_backed_up_leaves_without_any_copy() -> None:
    driver = make_driver()
    seq_id = start(driver, range(8))
    plan(driver, lambda view: Decision(backups=(BackupOrder(seq_id, 2, Tier.HOST),)))
    driver.settle()
    choose(driver, swap_out(seq_id), idle)
    driver.plan()
    assert driver.executor.transfers == []
    assert driver.loop.state.ledger.num_available == 16
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


def test_a_tail_that_comes_back_dies_and_is_copied_anew_next_time() -> None:
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
    assert len(back.blocks) == 1  # the tail: nobody shares it
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


def test_a_failed_swap_out_is_a_miss_never_an_answer() -> None:
    driver = make_driver()
    seq_id = start(driver)
    plan(driver, swap_out(seq_id))
    driver.evict_everything()
    driver.settle(ok=False)
    assert driver.seq(seq_id).status is Status.WAITING
    driver.run()


def test_a_failed_backup_is_forgotten_and_written_again() -> None:
    driver = make_driver()
    seq_id = start(driver)
    plan(driver, back_up(seq_id, 1))
    driver.settle(ok=False)
    assert driver.seq(seq_id).backups == []
    assert [len(t.blocks) for t in plan(driver, swap_out(seq_id)).transfers] == [3]
    driver.settle()
    driver.evict_everything()
    plan(driver, resume(seq_id))
    driver.run()


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


def test_a_client_that_hangs_up_while_its_blocks_travel_gives_everything_back() -> None:
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


def test_a_swapped_sequence_that_nobody_resumes_is_a_stall_and_says_so() -> None:
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


def test_a_shared_prefix_may_move_while_the_rest_of_a_sequence_is_on_its_way_in() -> None:
    """The sequence that comes back holds a reference to blocks that no copy touches: it must follow them too."""
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


# -- what a view shows of backups ------------------------------------------------------------------------------------


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


def test_a_view_forgets_backups_that_a_failed_restore_of_another_sequence_lost() -> None:
    """Both hold the content in blocks of their own, since neither had it sealed when the other began."""
    driver = make_driver(max_batched_tokens=64)
    for _ in range(2):
        driver.submit(range(10), max_tokens=12, ignore_eos=True)
    driver.step()
    assert not set(driver.seq(FIRST).blocks) & set(driver.seq(SECOND).blocks)
    plan(driver, back_up(SECOND))
    driver.settle()
    plan(driver, swap_out(FIRST))  # the indexed copy of the prefix goes ...
    driver.settle()
    driver.evict_everything()
    assert shown_backups(driver) == {SECOND: 2}
    plan(driver, resume(FIRST))  # ... so that it comes back from the backups that the other one keeps
    driver.step()
    driver.settle(ok=False)
    assert driver.seq(SECOND).backups == []
    assert shown_backups(driver) == {SECOND: 0}


def test_a_view_counts_anew_what_is_exclusive_when_a_sequence_comes_back() -> None:
    """It left with blocks of its own and comes back to those that a copy still reads: preempting it frees nothing."""
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


def test_backups_of_what_must_be_computed_again_do_not_count_for_what_is_on_the_device() -> None:
    """The first block is lost, so the backup of the second is no help; a policy that counts on it runs out of slots."""
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
    )  # the tail: the second is there, and counts again
    driver.settle()
    choose(driver, resume(seq_id))
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
