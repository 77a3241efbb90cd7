"""A real model's tokens under pressure are those of stock vLLM with room for every request (fp32, greedy)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from floodplain.core.plan import Decision, PreemptionMode, Reason, TransferKind
from floodplain.core.view import View
from floodplain.memory.digest import SEED
from floodplain.memory.swap_space import SwapSpace
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import settings_for
from tests.vllm.engines import (
    Load,
    controller_of,
    drive,
    make_load,
    scheduler_of,
    worker_of,
)
from tests.vllm.storm import StormPolicy

LOAD = make_load(seed=0, num_requests=16)


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    return model


@pytest.mark.quick
def test_swapped_requests_keep_their_tokens_and_resume_with_one_token(
    llm: LLM, load: Load, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_of(llm).links, "learn", lambda copied: None)  # after a slow copy, recomputing pays
    decisions: list[Decision] = []
    controller_of(llm).watchers.append(lambda view, now, decision: decisions.append(decision))
    num_before = controller_of(llm).books.num_resumed
    run = drive(llm, load)
    assert run.tokens == expected
    swaps = [p for d in decisions for p in d.preemptions if p.mode is PreemptionMode.SWAP]
    assert len(swaps) > 10 and controller_of(llm).books.num_resumed - num_before > 10
    assert len(run.resumed) > 10
    assert set(run.resumed) == {1}


@pytest.mark.quick
def test_under_timely_some_requests_wait_in_line_and_tokens_stay(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    seen: list[tuple[View, Decision]] = []
    controller_of(llm).watchers.append(lambda view, now, decision: seen.append((view, decision)))
    goals = {"ttft_goal_s": 0.05, "tpot_goal_s": 0.02}
    scheduler_of(llm).policy_object = make_policy("timely", settings_for("timely", **goals))
    assert drive(llm, load).tokens == expected
    assert {decision.reason for _, decision in seen} & {Reason.PROMISED, Reason.CROWDED}
    assert any(view.demand.median_prompt and view.demand.step_s for view, _ in seen)


@pytest.mark.quick
def test_tokens_survive_a_storm(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=0)
    assert drive(llm, load).tokens == expected
    assert policy.num_sent_away > 50


@pytest.mark.quick
def test_without_digests_damage_would_be_seen_in_the_tokens(
    llm: LLM, load: Load, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: swapped-in zeros with matching digests change most outputs."""
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
