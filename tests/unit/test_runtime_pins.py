"""The KV of ended requests in swap space: saved when they end, found by the next request of their session."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from floodplain.core.plan import BackupOrder, StepPlan, TransferKind
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.tiers import Link, Tier
from floodplain.core.view import Prices
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.prefixes import least_chance_to_save
from floodplain.runtime.sessions import SessionBook
from floodplain.runtime.swaps import Swaps
from tests.support.driver import Driver, ScriptedPolicy
from tests.support.loops import make_loop, make_request
from tests.support.views import host

PROMPT = range(10)


def make_driver(num_blocks: int = 16, num_slots: int = 16, **kwargs: object) -> Driver:
    kwargs = {"pins_sessions": True} | kwargs
    return Driver(make_loop(num_blocks=num_blocks, num_slots=num_slots, **kwargs))  # type: ignore[arg-type]


def turn(driver: Driver, prompt: list[int], session: str = "chat", max_tokens: int = 4) -> SeqId:
    """Submit a session's next request."""
    request = make_request("r", tuple(prompt), driver.tick(), max_tokens=max_tokens, ignore_eos=True)
    return driver.submit_request(replace(request, session=session))


def talk(driver: Driver, session: str = "chat") -> tuple[SeqId, SeqId]:
    """Two requests of a session; the device evicts everything between them. Returns their ids."""
    first = turn(driver, [*PROMPT], session)
    driver.run()
    driver.evict_everything()
    second = turn(driver, [*PROMPT, *driver.outputs[first], 21, 22], session)
    driver.run()
    return first, second


@pytest.mark.parametrize("session", ["chat", ""])
def test_the_next_request_of_a_session_fetches_what_the_last_one_computed(session: str) -> None:
    driver = make_driver()
    talk(driver, session)
    assert driver.loop.counters.num_cached_tokens == 12  # of 13 computed tokens, in blocks of 4
    sessions = driver.loop.state.sessions
    assert sessions is not None and (sessions.counts.hits, sessions.counts.misses) == (1, 0)
    kinds = [transfer.kind for plan in driver.executor.plans for transfer in plan.transfers]
    assert kinds == [TransferKind.BACKUP, TransferKind.SWAP_IN, TransferKind.BACKUP]


@pytest.mark.parametrize("kwargs", [{"pins_sessions": False}, {"num_slots": 0}, {"caches_prefixes": False}])
def test_without_pins_it_is_computed_again(kwargs: dict[str, object]) -> None:
    driver = make_driver(**kwargs)  # type: ignore[arg-type]
    talk(driver)
    assert driver.loop.state.sessions is None
    assert driver.loop.counters.num_cached_tokens == 0


def test_the_blocks_of_the_last_request_are_saved_although_nothing_is_live() -> None:
    policy = ScriptedPolicy()
    driver = make_driver(policy=policy)
    turn(driver, [*PROMPT])
    while driver.loop.state.sequences:
        driver.step()
    num_views = len(policy.views)
    assert driver.loop.has_unfinished
    plan = driver.step()
    assert not (plan.decodes or plan.prefills) and len(policy.views) == num_views, "there is nothing to decide"
    [transfer] = plan.transfers
    assert (transfer.kind, transfer.seq_id, len(transfer.blocks)) == (TransferKind.BACKUP, None, 3)
    assert driver.loop.state.ledger.num_draining == 3
    driver.settle()
    assert not driver.loop.has_unfinished
    driver.check_at_rest()


def test_an_aborted_request_is_not_saved_and_the_next_one_of_its_session_is() -> None:
    driver = make_driver()
    one = turn(driver, [*PROMPT])
    driver.step()
    driver.loop.finish(one, FinishReason.ABORT, driver.tick())
    assert not driver.loop.has_unfinished and not driver.loop.state.unsaved_pins
    turn(driver, [*PROMPT])
    driver.run()
    assert len(driver.loop.state.backups.idle.pins) == 1


def test_pins_end_as_the_loop_steps_on() -> None:
    """If a slot costs a hundredth of a return per second."""
    driver = make_driver()
    turn(driver, [*PROMPT], "gone")
    driver.run()
    idle = driver.loop.state.backups.idle
    [pin] = idle.pins
    idle.price = 0.01
    driver.now += 1000.0
    turn(driver, [*range(30, 40)], "new")
    driver.run()
    assert pin not in idle.pins and len(idle.pins) == 1


def test_what_two_sessions_share_is_saved_once() -> None:
    driver = make_driver()
    turn(driver, [*PROMPT], "a")
    turn(driver, [*PROMPT], "b")
    plans = driver.run()
    saved = [location for plan in plans for transfer in plan.transfers for location in transfer.locations]
    assert len(saved) == len(set(saved)) == 3


def test_pinned_kv_does_not_keep_live_requests_from_swap_space() -> None:
    driver = make_driver(num_slots=3)
    turn(driver, [*PROMPT])
    driver.run()
    backups = driver.loop.state.backups
    assert (backups.num_available(Tier.HOST), backups.idle.count_pinned(Tier.HOST)) == (3, 3)


def test_a_pin_takes_no_slots_of_a_worthier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionBook, "advance", lambda book, now: None)  # what a pin is worth stays
    driver = make_driver(num_slots=3)
    turn(driver, [*PROMPT], "first")
    driver.run()
    backups = driver.loop.state.backups
    [first] = backups.idle.pins
    keys = list(first.keys)
    for worth, num_left in ((1e6, 3), (0.0, 0)):
        first.worth = worth
        turn(driver, [*range(30, 40)], "second")
        driver.run()
        assert sum(backups.find(key) is not None for key in keys) == num_left


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_ahead_of_need_take_no_pinned_slots(is_pinned: bool) -> None:
    policy = ScriptedPolicy()
    driver = make_driver(num_slots=3, policy=policy)
    turn(driver, [*PROMPT])
    driver.run()
    backups = driver.loop.state.backups
    if not is_pinned:
        backups.unpin(next(iter(backups.idle.pins)))
    other = turn(driver, [*range(30, 40)], "other", max_tokens=9)
    driver.step()
    fcfs, order = FcfsPolicy(), BackupOrder(other, 2, Tier.HOST)
    policy.script.append(lambda view: replace(fcfs.decide(view, driver.now, Random(0)), backups=(order,)))
    assert len(driver.step().transfers) == (not is_pinned)
    driver.loop.finish(other, FinishReason.ABORT, driver.tick())
    driver.run()


def test_slots_of_pinned_kv_are_not_returned_as_unused() -> None:
    driver = make_driver()
    turn(driver, [*PROMPT])
    driver.run()
    backups = driver.loop.state.backups
    taken = set(backups.slots[Tier.HOST].taken)
    assert backups.kept_slots(Tier.HOST) == taken and not set(backups.empty_slots(Tier.HOST, taken)) & taken
    backups.unpin(next(iter(backups.idle.pins)))
    assert backups.kept_slots(Tier.HOST) == set() and set(backups.empty_slots(Tier.HOST, taken)) == taken


def test_while_copying_is_slower_than_computing_nothing_is_saved() -> None:
    driver = make_driver(max_model_len=64)
    state = driver.loop.state
    state.links = type(state.links)([Link(Tier.HOST, 1.0)], 100)  # 100 s for a block
    turn(driver, [*PROMPT])
    plans = driver.run()
    assert state.prices.now.prefill_token_s > 0
    assert not any(plan.transfers for plan in plans)


@pytest.mark.parametrize(
    ("block_s", "least"), [(0.0, 0.0), (0.01, 1 / 3), (0.02, 1.0), (0.04, float("inf")), (0.05, float("inf"))]
)
def test_a_copy_and_its_return_cost_less_than_computing_by_the_chance_of_a_return(block_s: float, least: float) -> None:
    prices = Prices(step_s=0.1, prefill_token_s=0.01)
    assert least_chance_to_save([host(block_s=block_s)], prices, 4) == pytest.approx(least)
    assert least_chance_to_save([], prices, 4) == float("inf")
    assert least_chance_to_save([host(block_s=block_s)], Prices(), 4) == 0.0


def test_a_loop_that_saves_too_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swaps, "save_pinned", lambda swaps, now: [])
    driver = make_driver()
    first = turn(driver, [*PROMPT])
    while driver.loop.state.sequences:
        driver.step()
    driver.loop.state.unsaved_pins.clear()
    driver.evict_everything()
    turn(driver, [*PROMPT, *driver.outputs[first], 21, 22])
    while driver.loop.state.sequences:
        assert isinstance(driver.step(), StepPlan)
    assert driver.loop.counters.num_cached_tokens == 0
