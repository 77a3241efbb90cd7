"""Tokens under pressure, storms and faults are those of stock vLLM with room for everybody (fp32, greedy)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM in its own environment: make test-vllm")

from vllm import LLM

from floodplain.core.plan import Decision, PreemptionMode, TransferKind
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.core.view import View
from floodplain.memory.digest import SEED
from floodplain.memory.swap_slots import EMPTY_DIGEST
from floodplain.memory.swap_space import SwapSpace
from floodplain.plugins.vllm.books import SwapBooks
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    close,
    desk_of,
    drive,
    expect_nothing_left,
    make_load,
    make_ours,
    scheduler_of,
    serve_calmly,
    worker_of,
)  # fmt: skip
from tests.vllm.storm import StormPolicy

NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def load() -> Load:
    return make_load(seed=0, num_requests=16)


@pytest.fixture(scope="module")
def expected(model: Path, load: Load) -> dict[int, list[int]]:
    return serve_calmly(model, load)


@pytest.fixture(scope="module")
def engine(model: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    """A pool for a third of the load, and prompts in chunks of 64 tokens."""
    flags = {"num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 64}
    llm = make_ours(model, {"policy": "cfs", "slice": 4, "swap_memory": "256MiB"}, **flags)
    yield llm
    close(llm)


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine as it was made; nothing is left in it afterwards."""
    scheduler = scheduler_of(engine)
    policy, books = scheduler.policy_object, scheduler._desk.books
    scheduler._desk.watchers.clear()
    yield engine
    expect_nothing_left(engine)
    scheduler.policy_object, scheduler._desk.books = policy, books


@pytest.mark.quick
def test_whoever_takes_turns_gets_the_same_tokens_and_computes_one_when_it_comes_back(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    decisions: list[Decision] = []
    desk_of(llm).watchers.append(lambda view, now, decision: decisions.append(decision))
    num_before = desk_of(llm).books.num_resumed
    run = drive(llm, load)
    assert run.tokens == expected
    swaps = [p for d in decisions for p in d.preemptions if p.mode is PreemptionMode.SWAP]
    assert len(swaps) > 10 and desk_of(llm).books.num_resumed - num_before > 10
    assert len(run.resumed) > 10
    assert set(run.resumed) == {1}


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.quick), 1, 2])
def test_tokens_survive_a_storm(llm: LLM, load: Load, expected: dict[int, list[int]], seed: int) -> None:
    scheduler = scheduler_of(llm)
    policy = scheduler.policy_object = StormPolicy(seed)
    assert drive(llm, load).tokens == expected
    assert policy.num_sent_away > 50


def test_aborted_requests_leave_nothing_and_disturb_nobody(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=7, chance=0.1)
    dice, aborted = Random(5), set[int]()

    def abort(step: int) -> None:
        if step % 7 == 3 and len(aborted) < 6:
            victim = dice.choice([index for index in range(len(load)) if index not in aborted])
            aborted.add(victim)
            llm.llm_engine.abort_request([str(victim)])

    tokens = drive(llm, load, each_step=abort).tokens
    assert len(aborted) == 6
    assert tokens == {index: expected[index] for index in tokens} and len(tokens) >= len(load) - 6


@pytest.mark.parametrize("num_slots", [0, 1, 12])
def test_swap_space_that_is_too_small_costs_time_and_no_token(
    llm: LLM, load: Load, expected: dict[int, list[int]], num_slots: int
) -> None:
    scheduler = scheduler_of(llm)
    books = scheduler._desk.books = SwapBooks([SlotLedger(Tier.HOST, num_slots)], BLOCK_TOKENS)
    books.bind(scheduler.finder.pool)
    scheduler.policy_object = StormPolicy(seed=2)
    assert drive(llm, load).tokens == expected


def test_damaged_copies_are_computed_again(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    scheduler_of(llm).policy_object = StormPolicy(seed=3, recompute=0.0)
    slots, dice = worker_of(llm).slots, Random(9)
    books, num_lost = desk_of(llm).books, 0
    settle = books.settle

    def note(transfer_id: int, lost: frozenset[int]) -> None:
        nonlocal num_lost
        num_lost += len(lost)
        settle(transfer_id, lost)

    books.settle = note  # type: ignore[method-assign]

    def damage(step: int) -> None:
        written = [slot for slot in range(slots.num_slots) if slots.digests[slot] != EMPTY_DIGEST]
        for slot in dice.sample(written, min(2, len(written))):
            slots.words[slot, 3, 5] ^= 1 << 20

    assert drive(llm, load, each_step=damage).tokens == expected
    del books.settle
    assert num_lost > 3


@pytest.mark.quick
def test_without_digests_damage_would_be_seen_in_the_tokens(
    llm: LLM, load: Load, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all of these: what comes back matters."""
    scheduler_of(llm).policy_object = StormPolicy(seed=4, recompute=0.0)
    slots, start = worker_of(llm).slots, SwapSpace.start

    def erase_first(space: SwapSpace, transfer: Any) -> None:
        if transfer.kind is TransferKind.SWAP_IN:
            for location in transfer.locations:
                slots.words[location.slot] = 0
                slots.digests[location.slot] = SEED
        start(space, transfer)

    monkeypatch.setattr(SwapSpace, "start", erase_first)
    tokens = drive(llm, load).tokens
    assert sum(tokens[index] != expected[index] for index in expected) > len(load) // 2


def test_the_same_views_give_the_same_decisions_outside_of_vllm(llm: LLM, load: Load) -> None:
    """What is recorded is replayed by a policy object of its own, after a trip through pickle."""
    scheduler = scheduler_of(llm)
    scheduler.policy_object = scheduler._settings.make_policy()
    made: list[tuple[View, float, Decision]] = []
    desk_of(llm).watchers.append(lambda *decided: made.append(decided))
    drive(llm, load)
    policy, rng = scheduler._settings.make_policy(), Random(0)
    assert any(decision.preemptions for _, _, decision in made)
    assert any(decision.resumptions for _, _, decision in made)
    for view, now, decision in pickle.loads(pickle.dumps(made)):
        assert policy.decide(view, now, rng) == decision
