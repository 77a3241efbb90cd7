"""Engines that have nothing to compute get recalls at once, and return what they borrowed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from random import Random
from threading import Lock
from typing import Any

import pytest

from floodplain import LLM, SamplingParams
from floodplain.core.errors import InvariantError
from floodplain.engine import shell
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.lending import peer_tier
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support.cluster_peers import until
from tests.support.lending import Neighbour, coordinating, tier_of
from tests.support.swapping import BLOCK_BYTES
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_PAGES = 4
NEVER_S = 3600.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
FLAGS = {
    "dtype": "float32", "max_model_len": 128, "kv_memory": 24 * BLOCK_BYTES, "swap": "peer",
    "swap_memory": 48 * BLOCK_BYTES, "peer_memory": NUM_PAGES * PAGE_BYTES,
}  # fmt: skip


@contextmanager
def neighbourhood(patch: pytest.MonkeyPatch) -> Iterator[tuple[Neighbour, EngineConfig]]:
    """(a neighbour that lends all pages with a long recall deadline, the configuration of its borrowers)."""
    patch.setattr(peer_tier, "CHUNK_BYTES", PAGE_BYTES)
    with coordinating() as url, closing(Neighbour(url, NUM_PAGES, NEVER_S)) as neighbour:
        neighbour.lend(NUM_PAGES)
        config = EngineConfig(model="dummy:tiny-llama", coordinator=url, device_name=f"idle-{os.getpid()}", **FLAGS)  # type: ignore[arg-type]
        yield neighbour, config


def test_an_idle_server_learns_of_leases_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "IDLE_S", NEVER_S)

    async def story(neighbour: Neighbour, engine: AsyncEngine) -> None:
        await engine.start()
        try:
            await until(lambda: neighbour.taken_pages == NUM_PAGES)
            neighbour.lend(0)
            await until(lambda: tier_of(engine.engine).totals.num_returned == NUM_PAGES)
            await until(lambda: not neighbour.taken_pages)
        finally:
            await engine.close()

    with neighbourhood(monkeypatch) as (neighbour, config):
        asyncio.run(story(neighbour, AsyncEngine.from_config(config)))


def make_llm(config: EngineConfig) -> LLM:
    return LLM(**asdict(config))


def prompts_of(seed: int) -> list[dict[str, list[int]]]:
    random = Random(seed)
    return [{"prompt_token_ids": [random.randrange(256) for _ in range(60)]} for _ in range(8)]


def test_an_llm_between_two_calls_gives_back_what_it_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call gives the same tokens: returned KV is computed again, or is in host memory."""
    with neighbourhood(monkeypatch) as (neighbour, config), make_llm(config) as llm:
        wait_until(lambda: neighbour.taken_pages == NUM_PAGES)
        expected = tokens_of(llm)
        assert llm.stats().swap_bytes["out", "peer"], "something lies there"
        neighbour.lend(0)
        wait_until(lambda: tier_of(llm.engine).totals.num_returned == NUM_PAGES)
        wait_until(lambda: not neighbour.taken_pages)
        neighbour.lend(NUM_PAGES)
        wait_until(lambda: neighbour.taken_pages == NUM_PAGES)
        assert tokens_of(llm) == expected
        assert tier_of(llm.engine).totals.num_forced == 0


def test_leases_that_an_llm_does_not_use_are_returned_and_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "IDLE_S", 0.05)  # between two boundaries of an LLM without calls
    with neighbourhood(monkeypatch) as (neighbour, config), make_llm(replace(config, lease_idle=0.5)) as llm:
        totals = tier_of(llm.engine).totals
        wait_until(lambda: totals.num_granted == NUM_PAGES)
        wait_until(lambda: not neighbour.taken_pages)
        assert totals.num_granted == NUM_PAGES, "nothing was asked for again meanwhile"
        expected = tokens_of(llm)

        def calls_and_borrows() -> bool:
            assert tokens_of(llm) == expected
            return neighbour.taken_pages > 0

        for _ in range(2):
            wait_until(calls_and_borrows)
            wait_until(lambda: not neighbour.taken_pages)
            assert totals.num_forced == 0


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts_of(3), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_only_one_thread_steps_an_llm_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls alternate with recalls: steps do not overlap, and no return is forced."""
    with neighbourhood(monkeypatch) as (neighbour, config), make_llm(config) as llm:
        step, inside = llm.engine.step, Lock()

        def step_alone() -> Any:
            assert inside.acquire(blocking=False), "two threads step at once"
            try:
                return step()
            finally:
                inside.release()

        monkeypatch.setattr(llm.engine, "step", step_alone)
        expected = tokens_of(llm)
        for num_pages in (0, NUM_PAGES, 1, NUM_PAGES):
            neighbour.lend(num_pages)
            assert tokens_of(llm) == expected
        assert tier_of(llm.engine).totals.num_forced == 0
        llm.generate(prompts_of(4)[0], GREEDY, use_tqdm=False)


def test_a_step_that_fails_between_two_calls_makes_the_next_one_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise InvariantError("for the test")

    with neighbourhood(monkeypatch) as (neighbour, config), make_llm(config) as llm:
        wait_until(lambda: neighbour.taken_pages == NUM_PAGES)
        assert llm.engine.neighbours is not None
        monkeypatch.setattr(llm.engine.neighbours, "at_boundary", fail)
        neighbour.lend(0)
        wait_until(lambda: not llm._idle._thread.is_alive())
        with pytest.raises(RuntimeError, match="failed between two calls: make a new one"):
            llm.generate("x", GREEDY, use_tqdm=False)


def test_an_llm_without_a_coordinator_has_no_thread_for_it() -> None:
    with LLM("dummy:tiny-llama", dtype="float32", kv_memory=2**20, max_model_len=128) as llm:
        assert llm._idle._thread.ident is None
