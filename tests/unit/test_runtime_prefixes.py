"""Prefixes in swap space: saved before the device evicts them, fetched by newcomers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import (
    BackupOrder,
    Chunk,
    Decision,
    Preemption,
    PreemptionMode,
    PrefixBackupOrder,
    Reason,
    Resumption,
    TransferKind,
)
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from tests.support.driver import Choice, Driver, computed
from tests.support.swap_choices import make_driver, plan

PROMPT = range(10)  # two full blocks of 4, and two tokens


def save(num_at_risk: int = 99, num_blocks: int = 99) -> Choice:
    """A decision that only saves; one of FCFS always has work to run as well."""
    return lambda view: Decision(prefix_backup=PrefixBackupOrder(num_at_risk, num_blocks, Tier.HOST))


def fetch(seq_id: SeqId) -> Choice:
    return lambda view: Decision(resumptions=(Resumption(seq_id, Reason.PREFIX_IN_SWAP),))


def live_through(driver: Driver, prompt: range = PROMPT) -> None:
    """Run a request to its end; its full blocks stay cached on the device."""
    driver.submit(prompt, max_tokens=2, ignore_eos=True)
    driver.run()


def saved(driver: Driver) -> SeqId:
    """Leave a prefix in swap space only; return a newcomer that begins with it."""
    live_through(driver)
    newcomer = driver.submit([*PROMPT, 21, 22], max_tokens=3, ignore_eos=True)
    plan(driver, save())
    driver.settle()
    driver.evict_everything()
    return newcomer


def num_idle(driver: Driver) -> int:
    return driver.loop.state.backups.num_idle(Tier.HOST)


def test_a_prefix_evicted_from_the_device_is_fetched_from_swap_space() -> None:
    driver = make_driver()
    newcomer = saved(driver)
    assert num_idle(driver) == 2
    [back] = plan(driver, fetch(newcomer)).transfers
    assert (back.kind, len(back.blocks), back.reason) == (TransferKind.SWAP_IN, 2, Reason.PREFIX_IN_SWAP)
    assert driver.seq(newcomer).status is Status.LOADING
    driver.settle()
    assert computed(driver.step()) == {newcomer: 4}
    assert driver.seq(newcomer).lifecycle.num_cached_tokens == 8
    driver.run()
    assert driver.loop.counters.num_cached_tokens == 8
    assert driver.loop.counters.num_recomputed_tokens == 0


def test_repeated_orders_save_all_blocks_at_risk_and_keep_their_order() -> None:
    driver = make_driver()
    live_through(driver)
    live_through(driver, range(30, 40))
    late = driver.submit([60], max_tokens=2, ignore_eos=True)
    cached = driver.loop.state.ledger.cached_blocks()
    assert len(cached) == 4
    saved_blocks: list[int] = []
    for num_left in (3, 2, 1):
        [transfer] = plan(driver, save(3, 1)).transfers
        driver.settle()
        saved_blocks += transfer.blocks
        assert num_idle(driver) == 4 - num_left
    made = plan(driver, lambda view: replace(save(3, 1)(view), admissions=(Chunk(late, 1),)))
    assert made.transfers == ()  # there is nothing to do
    assert sorted(saved_blocks) == sorted(cached[:3])
    assert driver.loop.state.ledger.cached_blocks() == cached
    driver.run()


def test_what_two_newcomers_need_is_brought_once() -> None:
    """The second newcomer waits for the first one's copy and shares its blocks; an unrelated one runs."""
    driver = make_driver()
    first = saved(driver)
    second = driver.submit([*PROMPT, 31, 32], max_tokens=3, ignore_eos=True)
    other = driver.submit([41, 42], max_tokens=3, ignore_eos=True)
    made = driver.step()
    assert [(move.seq_id, len(move.blocks)) for move in made.transfers] == [(first, 2)]
    assert computed(made) == {other: 2}
    assert not driver.step().transfers  # the copy is under way
    assert driver.seq(second).status is Status.WAITING
    driver.settle()
    assert computed(driver.step()).keys() >= {first, second}
    assert driver.seq(first).blocks[:2] == driver.seq(second).blocks[:2]
    driver.run()
    assert driver.loop.counters.num_cached_tokens == 16


@pytest.mark.parametrize("ok", [True, False])
def test_if_the_first_is_aborted_or_its_copy_fails_the_second_goes_on(ok: bool) -> None:
    driver = make_driver()
    first = saved(driver)
    second = driver.submit([*PROMPT, 31, 32], max_tokens=3, ignore_eos=True)
    driver.plan()
    if ok:
        driver.loop.finish(first, FinishReason.ABORT, driver.now)
    driver.settle(ok=ok)
    driver.run()
    assert driver.finished[second] is FinishReason.LENGTH
    assert driver.loop.counters.num_cached_tokens == (8 if ok else 0)


def test_a_swap_out_takes_no_slot_of_a_prefix_fetched_in_that_step() -> None:
    """Two prefixes of two blocks are idle, one slot is free, three are needed: the other prefix is evicted."""
    driver = make_driver(num_slots=5)
    live_through(driver)
    live_through(driver, range(30, 40))
    newcomer = driver.submit([*PROMPT, 21, 22], max_tokens=3, ignore_eos=True)
    leaver = driver.submit(range(60, 70), max_tokens=3, ignore_eos=True)
    plan(driver, save())
    driver.settle()
    driver.evict_everything()
    plan(driver, lambda view: Decision(admissions=(Chunk(leaver, 10),)))
    leaves = Preemption(leaver, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
    comes = Resumption(newcomer, Reason.PREFIX_IN_SWAP)
    made = plan(driver, lambda view: Decision(preemptions=(leaves,), resumptions=(comes,)))
    assert [(move.kind, len(move.blocks)) for move in made.transfers] == [
        (TransferKind.SWAP_OUT, 3),
        (TransferKind.SWAP_IN, 2),
    ]
    driver.settle()
    plan(driver, lambda view: Decision(resumptions=(Resumption(leaver, Reason.SLICE_BEGINS),)))
    driver.settle()
    driver.run()


def test_a_fetch_that_failed_is_computed_and_not_tried_for_ever() -> None:
    driver = make_driver()
    newcomer = saved(driver)
    plan(driver, fetch(newcomer))
    driver.settle(ok=False)
    assert driver.seq(newcomer).status is Status.WAITING
    assert computed(driver.step()) == {newcomer: 12}
    driver.run()
    assert driver.loop.counters.num_failed_transfers == 1
    assert driver.loop.counters.num_cached_tokens == 0


def test_need_takes_the_slots_of_the_prefix_that_was_used_least_recently() -> None:
    driver = make_driver(num_slots=4)
    for first in (0, 30, 60):
        live_through(driver, range(first, first + 10))
        driver.submit([5], max_tokens=1, ignore_eos=True)
        plan(driver, save(2 if first else 99))
        driver.settle()
        driver.run()
        driver.evict_everything()
    found = []
    for first in (0, 30, 60):
        newcomer = driver.submit(range(first, first + 10), max_tokens=1, ignore_eos=True)
        driver.run()
        found.append(driver.finished[newcomer] is FinishReason.LENGTH and driver.loop.counters.num_cached_tokens)
    assert found == [0, 8, 16]


def test_an_ended_request_loses_its_last_backup_first() -> None:
    driver = make_driver(num_slots=2)
    first = driver.submit(PROMPT, max_tokens=9, ignore_eos=True)
    plan(driver, lambda view: Decision(admissions=(Chunk(first, 10),)))
    plan(driver, lambda view: Decision(decodes=(first,), backups=(BackupOrder(first, 2, Tier.HOST),)))
    driver.settle()
    keys = driver.loop.state.sequences[first].keys[:2]
    driver.loop.finish(first, FinishReason.STOP, driver.tick())
    backups = driver.loop.state.backups
    backups.begin_write(Tier.HOST, [BlockKey(b"needed")])
    assert [backups.find(key) is not None for key in keys] == [True, False]
