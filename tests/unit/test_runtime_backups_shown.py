"""Backups in a view, including those that other sequences wrote or lost."""

from __future__ import annotations

from floodplain.core.request import SeqId
from floodplain.core.view import View
from tests.support.driver import Driver
from tests.support.swap_choices import FIRST, SECOND, back_up, choose, idle, make_driver, plan, resume, start, swap_out


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
