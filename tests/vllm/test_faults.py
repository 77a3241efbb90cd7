"""Storms, aborts, damage and scarce swap space cost no token: the plug-in on a small Llama (fp32, greedy)."""

from __future__ import annotations

import pickle
from random import Random

import pytest
from vllm import LLM

from floodplain.core.plan import Decision
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.core.view import View
from floodplain.memory.digest import SEED
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots
from floodplain.plugins.vllm.books import SwapBooks
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    controller_of,
    drive,
    drive_with_aborts,
    make_load,
    scheduler_of,
    worker_of,
)
from tests.vllm.storm import StormPolicy

LOAD = make_load(seed=0, num_requests=16)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_survive_a_storm(
    llm: LLM, load: Load, expected: dict[int, list[int]], ages: list[int], seed: int
) -> None:
    """Kept rows of each view equal rows made anew, too."""
    policy = scheduler_of(llm).policy_object = StormPolicy(seed)
    assert drive(llm, load).tokens == expected
    assert policy.num_sent_away > 50
    assert len(ages) > 500 and max(ages) > BLOCK_TOKENS // 2


def test_aborted_requests_leave_nothing_and_disturb_no_other(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=7, chance=0.1)
    drive_with_aborts(llm, load, expected, seed=5, number=6, period=7)


@pytest.mark.parametrize("num_slots", [0, 1, 12])
def test_swap_space_that_is_too_small_costs_time_and_no_token(
    llm: LLM, load: Load, expected: dict[int, list[int]], num_slots: int
) -> None:
    scheduler = scheduler_of(llm)
    books = scheduler._controller.books = SwapBooks([SlotLedger(Tier.HOST, num_slots)], scheduler.groups)
    books.bind(scheduler.finder.pool)
    scheduler.policy_object = StormPolicy(seed=2)
    assert drive(llm, load).tokens == expected


def erase(slots: Slots, dice: Random, *, keeps_digest: bool) -> None:
    """Zero two copies; unless ``keeps_digest``, give them digests that match."""
    written = [slot for slot in range(slots.num_slots) if slots.digests[slot] != EMPTY_DIGEST]
    for slot in dice.sample(written, min(2, len(written))):
        slots.words[slot] = 0
        if not keeps_digest:
            slots.digests[slot] = SEED


def test_damaged_copies_are_computed_again(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=3, recompute=0.0)
    slots, dice = worker_of(llm).slots, Random(9)
    books, num_lost = controller_of(llm).books, 0
    settle = books.settle

    def note(transfer_id: int, lost: frozenset[int]) -> None:
        nonlocal num_lost
        num_lost += len(lost)
        settle(transfer_id, lost)

    books.settle = note  # type: ignore[method-assign]
    assert drive(llm, load, each_step=lambda _: erase(slots, dice, keeps_digest=True)).tokens == expected
    del books.settle
    assert num_lost > 3


def test_the_same_damage_shows_in_the_tokens_without_digests(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    """Negative control: otherwise damage might never change a token of this model."""
    scheduler_of(llm).policy_object = StormPolicy(seed=3, recompute=0.0)
    slots, dice = worker_of(llm).slots, Random(9)
    tokens = drive(llm, load, each_step=lambda _: erase(slots, dice, keeps_digest=False)).tokens
    assert sum(tokens[index] != expected[index] for index in expected) > 3


def test_the_same_views_give_the_same_decisions_outside_of_vllm(llm: LLM, load: Load) -> None:
    """Another policy object replays the recorded views after a round trip through pickle."""
    scheduler = scheduler_of(llm)
    scheduler.policy_object = scheduler._settings.make_policy()
    made: list[tuple[View, float, Decision]] = []
    controller_of(llm).watchers.append(lambda *decided: made.append(decided))
    drive(llm, load)
    policy, rng = scheduler._settings.make_policy(), Random(0)
    assert any(decision.preemptions for _, _, decision in made)
    assert any(decision.resumptions for _, _, decision in made)
    for view, now, decision in pickle.loads(pickle.dumps(made)):
        assert policy.decide(view, now, rng) == decision
