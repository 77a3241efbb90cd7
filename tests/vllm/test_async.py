"""Async scheduling: tokens are those of stock vLLM that plans each step after the last one has ended.

vLLM's engine plans a step while the one before is outstanding, so that policies preempt requests whose next token is
not known yet. vLLM's own model runner computes on a CPU (see ``ahead``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.vllm.ahead import plan_ahead
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    as_made,
    close,
    drive,
    drive_with_aborts,
    make_crowded,
    make_load,
    scheduler_of,
    serve_calmly,
)
from tests.vllm.storm import StormPolicy


@dataclass(frozen=True)
class StoppedLoad(Load):
    """Every other request ends with a stop token, so its end is unknown until the token is computed."""

    stops: tuple[int, ...] = ()

    def params(self, index: int) -> SamplingParams:
        params = super().params(index)
        if index % 2:
            params.stop_token_ids = [self.stops[index]]
        return params

    def cut(self, tokens: dict[int, list[int]]) -> dict[int, list[int]]:
        """Cut outputs that were not stopped after their stop tokens."""
        ends = {index: said.index(self.stops[index]) + 1 for index, said in tokens.items() if index % 2}
        return {index: said[: ends.get(index)] for index, said in tokens.items()}


@pytest.fixture(scope="module")
def plain() -> Load:
    return make_load(seed=5, num_requests=12, num_common=40)


@pytest.fixture(scope="module")
def calm(llama: Path, plain: Load) -> dict[int, list[int]]:
    return serve_calmly(llama, plain, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def load(plain: Load, calm: dict[int, list[int]]) -> StoppedLoad:
    stops = (max(set(calm[index]), key=calm[index].index) for index in range(len(plain)))  # the last to occur first
    return StoppedLoad(plain.prompts, plain.lengths, tuple(stops))


@pytest.fixture(scope="module")
def expected(load: StoppedLoad, calm: dict[int, list[int]]) -> dict[int, list[int]]:
    return load.cut(calm)


@pytest.fixture(scope="module")
def engine(llama: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        plan_ahead(patch)
        flags = {"num_gpu_blocks_override": 32, "enable_prefix_caching": True}
        llm = make_crowded(llama, async_scheduling=True, skip_tokenizer_init=True, **flags)
        yield llm
        close(llm)


@pytest.fixture
def early(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens that were outstanding, for each request that was preempted with a step outstanding."""
    scheduler, found = scheduler_of(engine), list[int]()
    depart = scheduler.note_departure

    def note(request: Any) -> None:
        if request.num_in_flight_tokens:
            found.append(request.num_output_placeholders)
        depart(request)

    monkeypatch.setattr(scheduler, "note_departure", note)
    return found


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine with its own policy and books; nothing is left in use after the test."""
    with as_made(engine):
        yield engine
    assert engine.reset_prefix_cache()


@pytest.mark.quick
def test_turns_are_taken_while_tokens_are_on_their_way(
    llm: LLM, plain: Load, calm: dict[int, list[int]], early: list[int], ages: list[int]
) -> None:
    run = drive(llm, plain)
    assert run.tokens == calm
    assert early.count(1) > 10, "preempted before their tokens were known"
    assert len(run.resumed) > 10


@pytest.mark.parametrize("seed", range(2))
def test_tokens_survive_storms_and_aborts_with_a_step_outstanding(
    llm: LLM, load: StoppedLoad, expected: dict[int, list[int]], early: list[int], ages: list[int], seed: int
) -> None:
    policy = scheduler_of(llm).policy_object = StormPolicy(seed, chance=0.1)
    drive_with_aborts(llm, load, expected, seed=seed, number=3, period=9)
    assert policy.num_sent_away > 20 and early.count(1) > 10
    assert len(ages) > 200, "rows are kept with a step outstanding, too"


def test_a_reset_with_a_step_outstanding_costs_no_token(
    llm: LLM, load: StoppedLoad, expected: dict[int, list[int]]
) -> None:
    """The step's tokens are discarded; its blocks are written until it ends."""
    scheduler, num_deferred = scheduler_of(llm), list[int]()

    def reset(step: int) -> None:
        if step % 8 == 7 and step < 120:
            assert llm.reset_prefix_cache(reset_running_requests=True)
            num_deferred.append(len(scheduler.deferred_blocks))

    assert drive(llm, load, each_step=reset).tokens == expected
    assert max(num_deferred) > 5


@pytest.mark.quick
def test_kv_of_the_outstanding_step_matters(
    llm: LLM, plain: Load, calm: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the KV that the step writes, tokens differ."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    swap_out = SwapBooks.swap_out

    def erase_last(books: SwapBooks, one: TrackedRequest, tables: Any, num_computed: int, *rest: Any) -> bool:
        if one.request.num_output_placeholders:
            block, place = divmod(num_computed - 1, BLOCK_TOKENS)
            for cache in runner.kv_caches:
                cache[tables[0][block].block_id, :, place] = 0
        return swap_out(books, one, tables, num_computed, *rest)

    monkeypatch.setattr(SwapBooks, "swap_out", erase_last)
    tokens = drive(llm, plain).tokens
    assert sum(tokens[index] != calm[index] for index in calm) > 2
