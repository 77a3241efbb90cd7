"""After a reset of the prefix cache, no KV of other weights is restored; it succeeds if it resets requests, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.interface import PauseState

from floodplain.core.plan import Decision, Reason
from floodplain.core.view import View
from floodplain.plugins.vllm.worker import SwapWorker
from floodplain.runtime.prices import StepPrices
from tests.vllm.engines import (
    Load,
    controller_of,
    drive,
    finished_tokens,
    make_load,
    scheduler_of,
    worker_of,
)  # fmt: skip
from tests.vllm.storm import StormPolicy

HOLD_STEPS = 3
"""Ended copies are reported every so many steps, so that some are nearly always in flight."""


LOAD = make_load(seed=3, num_requests=12, num_common=40)
FLAGS = {"num_gpu_blocks_override": 36, "enable_prefix_caching": True}


@pytest.fixture
def llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The engine with slow copies, in a storm; unmeasured, they are worth it on a busy machine, too."""
    finish, num_calls = SwapWorker.finish, Counter[str]()

    def finish_late(worker: SwapWorker) -> tuple[set[str], set[str]]:
        num_calls["finish"] += 1
        return (set(), set()) if num_calls["finish"] % HOLD_STEPS else finish(worker)

    monkeypatch.setattr(SwapWorker, "finish", finish_late)
    monkeypatch.setattr(scheduler_of(llm), "_prices", StepPrices())
    monkeypatch.setattr(StepPrices, "learn", lambda *args, **more: None)
    scheduler_of(llm).policy_object = StormPolicy(seed=6, chance=0.15, recompute=0.1)
    return llm


def index_of(request: Any) -> int:
    """Index of a request, without the suffix that vLLM adds to its name."""
    return int(request.request_id.partition("-")[0])


def count_copies(llm: LLM) -> Counter[str]:
    """Copies in flight by direction, and requests whose swap-in has ended and that are not scheduled yet."""
    scheduler, moves = scheduler_of(llm), controller_of(llm).books.transfers
    ways = Counter("back" if move.is_inbound else "out" for move in moves if not move.cargo.is_void)
    return ways + Counter("come" for _ in scheduler.finished_recving_kv_req_ids)


def expect_forgotten(llm: LLM) -> None:
    """Check that only swap-ins and an outstanding step hold blocks, and that no KV is kept."""
    scheduler, controller = scheduler_of(llm), controller_of(llm)
    num_held = controller.books.count_draining(scheduler.deferred_blocks)
    assert scheduler.finder.count_free() + num_held == scheduler.finder.num_blocks
    assert not any(one.has_kv for one in controller.roster)
    assert not scheduler.finder.pool.cached_block_hash_to_block._cache
    assert not scheduler.running and all(not request.num_computed_tokens for request in scheduler.waiting)


@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_in_a_storm_succeeds_and_costs_no_token(
    llm: LLM, load: Load, expected: dict[int, list[int]], reset_connector: bool
) -> None:
    seen = Counter[str]()

    def reset(step: int) -> None:
        under_way = {way for way, number in count_copies(llm).items() if number}
        if step < 300 and (step % 8 == 7 or ("back" in under_way and seen["back"] < 3)):
            seen.update(under_way)
            assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=reset_connector)
            expect_forgotten(llm)

    assert drive(llm, load, each_step=reset).tokens == expected
    assert seen["out"] > 2 and seen["back"] > 2, seen


def test_aborts_around_resets_leave_nothing(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    aborted = set[int]()

    def abort_and_reset(step: int) -> None:
        loading = [index_of(request) for request in scheduler_of(llm)._holding]
        if loading and len(aborted) < 5 and step > 10:
            aborted.add(loading[0])
            llm.llm_engine.abort_request([str(loading[0])])
            if len(aborted) % 2:
                assert llm.reset_prefix_cache(reset_running_requests=True)
                expect_forgotten(llm)

    tokens = drive(llm, load, each_step=abort_and_reset).tokens
    assert len(aborted) == 5
    assert tokens == {index: expected[index] for index in tokens} and len(tokens) >= len(load) - 5


def test_a_reset_that_spares_requests_fails_while_they_hold_blocks(
    llm: LLM, load: Load, expected: dict[int, list[int]]
) -> None:
    """As in vLLM, a failed reset forgets nothing. After the last request it succeeds, despite copies in flight."""
    kept: list[int] = []

    def reset(step: int) -> None:
        scheduler, roster = scheduler_of(llm), controller_of(llm).roster
        if step % 10 == 9:
            before = sum(len(one.known_backups) for one in roster)
            is_held = bool(scheduler.running or len(scheduler._holding))
            assert llm.reset_prefix_cache() is not is_held
            assert sum(len(one.known_backups) for one in roster) == before * is_held
            kept.append(before * is_held)

    assert drive(llm, load, each_step=reset).tokens == expected
    assert max(kept) > 5
    assert llm.reset_prefix_cache()
    expect_forgotten(llm)


def test_sleep_and_waking_up_in_a_storm_cost_no_token(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """On a CPU, memory stays; this checks that caches are reset before, and that no copy is in flight then."""
    core, connector = llm.llm_engine.engine_core.engine_core, get_kv_transfer_group()  # type: ignore[attr-defined]

    def sleep(step: int) -> None:
        if step % 20 == 19 and step < 200:
            core.sleep(1, mode="keep")
            expect_forgotten(llm)
            connector.unregister_kv_caches()  # as vLLM 0.33 does
            assert worker_of(llm)._space.num_in_flight == 0
            connector.restore_kv_caches()
            core.wake_up()
            assert not core.is_sleeping()

    assert drive(llm, load, each_step=sleep).tokens == expected
    assert type(connector).supports_sleep_mode(llm.llm_engine.vllm_config.kv_transfer_config)


def test_requests_that_run_end_while_new_ones_are_held(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """Running requests are not preempted for requests that vLLM does not admit."""
    scheduler = scheduler_of(llm)
    scheduler.policy_object = scheduler._settings.make_policy()
    reasons, held = Counter[Reason](), list[int]()

    def note(view: View, now: float, decision: Decision) -> None:
        if len(held) == 1:
            reasons.update(order.reason for order in decision.preemptions)
            assert not decision.resumptions and not decision.admissions

    def hold(step: int) -> None:
        if step == 20:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
            held.append(len(scheduler.running))
        elif len(held) == 1 and not scheduler.get_num_unfinished_requests():
            scheduler.set_pause_state(PauseState.UNPAUSED)
            held.append(len(scheduler.waiting))

    controller_of(llm).watchers.append(note)
    assert drive(llm, load, each_step=hold).tokens == expected
    assert held[0] > 0 and held[1] > 0 and Reason.SLICE_ENDED not in reasons


# -- other weights -----------------------------------------------------------------------------------------------------


def scale_weights(llm: LLM, factor: float) -> None:
    """Give the same tokens other KV; ``factor`` is a power of two, which rounds nothing."""

    def scale(model: Any) -> None:
        with torch.no_grad():
            for layer in model.model.layers[::3]:
                layer.input_layernorm.weight.mul_(factor)

    llm.apply_model(scale)


@pytest.mark.parametrize("resets", [True, False])
def test_requests_go_on_as_if_the_new_weights_had_computed_their_past(llm: LLM, load: Load, resets: bool) -> None:
    """Negative control: without a reset, most do not."""
    past: dict[int, list[int]] = {}

    def update(step: int) -> None:
        if step == 40:
            past.update((index_of(r), list(r.output_token_ids)) for r in scheduler_of(llm).requests.values())
            scale_weights(llm, 0.5)
            if resets:
                assert llm.reset_prefix_cache(reset_running_requests=True)

    tokens = drive(llm, load, each_step=update).tokens
    scheduler_of(llm).policy_object = StormPolicy(seed=0, chance=0.0)
    assert llm.reset_prefix_cache()
    same = []
    for index, before in past.items():
        assert tokens[index][: len(before)] == before
        if len(before) < load.lengths[index]:
            rest = Load(((*load.prompts[index], *before),), (load.lengths[index] - len(before),))
            rest.send(llm)
            ended: dict[int, list[int]] = {}
            while not ended:
                ended = finished_tokens(llm)
            same.append(ended[0] == tokens[index][len(before) :])
    scale_weights(llm, 2.0)
    assert llm.reset_prefix_cache()
    assert len(same) > 6 and sum(bool(before) for before in past.values()) > 3
    assert all(same) if resets else sum(same) < len(same) // 2
