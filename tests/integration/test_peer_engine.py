"""An engine that swaps to a neighbour's memory: a real (tiny, fp32) model, coordinator and device of the machine.

Its policy swaps far more than needed, while the neighbour lends, recalls and lends again. Tokens are those of an engine
that never swapped; no borrowed memory stays taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import cycle
from random import Random
from typing import Any

import pytest

from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.lending import peer_tier
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support import swap_faults
from tests.support.calm import run_calmly
from tests.support.lending import Neighbour, coordinating, step_until, tier_of
from tests.support.parity import Reference, Verdict, judge
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
NUM_PAGES = 8
DEADLINE_S = 1.5
CHUNK_BLOCKS = PAGE_BYTES // BLOCK_BYTES
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = Random(3)
    return [
        Request(request_id=str(i), prompt_token_ids=tuple(rng.randrange(256) for _ in range(rng.randrange(20, 80))),
                params=GREEDY, arrival_s=float(i))
        for i in range(24)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    return run_calmly(requests, **BASE)


@contextmanager
def neighbourhood(
    patch: pytest.MonkeyPatch, deadline_s: float = HANG_S, host_blocks: int = 64
) -> Iterator[tuple[Neighbour, Engine]]:
    """(a neighbour, an engine that borrows a chunk of one page at a time)."""
    patch.setattr(peer_tier, "CHUNK_BYTES", PAGE_BYTES)
    with coordinating() as url, closing(Neighbour(url, NUM_PAGES, deadline_s)) as neighbour:
        config = EngineConfig(
            model="dummy:tiny-llama", kv_memory=24 * BLOCK_BYTES, swap="peer", coordinator=url,
            device_name=f"borrower-{os.getpid()}", swap_memory=host_blocks * BLOCK_BYTES,
            peer_memory=NUM_PAGES * PAGE_BYTES, **BASE,
        )  # fmt: skip
        with closing(build_engine(config, ImpatientPolicy())) as engine:
            yield neighbour, engine
        assert neighbour.taken_pages == 0, "borrowed memory stays taken"


def serve(
    engine: Engine, requests: list[Request], at_step: Callable[[int], None], is_over: Callable[[], bool] = lambda: True
) -> list[list[int]]:
    """Run all requests repeatedly, at most 8 at a time, until ``is_over``; return their tokens."""
    tokens: list[list[int]] = []
    by_seq: dict[int, int] = {}
    num_open = step = 0
    while num_open or len(tokens) % len(requests) or not tokens or not is_over():
        if num_open < 8 and (len(tokens) < len(requests) or len(tokens) % len(requests) or not is_over()):
            by_seq[engine.add(requests[len(tokens) % len(requests)])] = len(tokens)
            tokens.append([])
            num_open += 1
        at_step(step)
        for seq_id, delta in engine.step():
            tokens[by_seq[seq_id]] += delta.token_ids
            num_open -= delta.finish_reason is not None
        if step % 16 == 0:
            engine.loop.check_integrity()
        step += 1
    return tokens


def verdict(expected: list[Reference], tokens: list[list[int]]) -> Verdict:
    """Judge the tokens of repeated requests."""
    return judge([expected[index % len(expected)] for index in range(len(tokens))], tokens)


def test_tokens_are_right_while_a_neighbour_lends_and_recalls(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    with neighbourhood(monkeypatch) as (neighbour, engine):
        totals, mover = tier_of(engine).totals, tier_of(engine)._mover
        neighbour.lend(NUM_PAGES)
        step_until(engine, lambda: totals.num_granted == NUM_PAGES)

        story = cycle([2, NUM_PAGES, 0, 5, NUM_PAGES])
        target = next(story)

        def go_on(step: int) -> None:
            nonlocal target
            if len(tier_of(engine)._held) == target and step % 40 == 0:
                target = next(story)
            neighbour.lend(target)

        def is_over() -> bool:
            return totals.num_returned >= 9 and all(mover.moved_bytes.values())

        tokens = serve(engine, requests, go_on, is_over)
        assert verdict(expected, tokens).is_equal
        traffic = engine.stats().swap_bytes
        assert traffic["out", "peer"] and traffic["in", "peer"] and traffic["in", "host"]
        assert totals.num_forced == totals.num_refused == 0
        assert not any(engine.stats().failed_transfers.values())


def test_a_blocked_loop_loses_its_slots_at_the_deadline_and_no_token(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forced path: no step runs while the neighbour waits, and its bytes are still freed."""
    with neighbourhood(monkeypatch, deadline_s=DEADLINE_S, host_blocks=4) as (neighbour, engine):
        totals = tier_of(engine).totals
        neighbour.lend(NUM_PAGES)
        step_until(engine, lambda: totals.num_granted == NUM_PAGES)

        def stand_still(step: int) -> None:
            if step == 100:
                neighbour.lend(0)
                wait_until(lambda: totals.num_forced == NUM_PAGES)  # the watch's thread returns all leases
                assert not neighbour.taken_pages

        tokens = serve(engine, requests, stand_still)
        assert verdict(expected, tokens).is_equal
        outcomes = engine.stats().borrowed_leases
        assert (outcomes["forced"], outcomes["returned"]) == (totals.num_forced, totals.num_returned)
        step_until(engine, lambda: not neighbour.agent.membership.lease_bytes())


def scribble(neighbour: Neighbour) -> None:
    """Overwrite all borrowed pages without informing the engine."""
    first = PAGE_BYTES
    os.pwrite(neighbour.device._fd, bytes([7]) * NUM_PAGES * PAGE_BYTES, first)


def test_bytes_that_were_changed_on_the_neighbour_are_never_an_answer(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    with neighbourhood(monkeypatch) as (neighbour, engine):
        neighbour.lend(NUM_PAGES)
        step_until(engine, lambda: tier_of(engine).totals.num_granted == NUM_PAGES)
        tokens = serve(engine, requests, lambda step: scribble(neighbour) if step % 40 == 20 else None)
        assert verdict(expected, tokens).is_equal
        assert engine.stats().failed_transfers["digest_mismatch"] > 0


def test_without_digests_changed_bytes_reach_an_answer(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_faults.believes_every_digest(monkeypatch)
    with neighbourhood(monkeypatch) as (neighbour, engine):
        neighbour.lend(NUM_PAGES)
        step_until(engine, lambda: tier_of(engine).totals.num_granted == NUM_PAGES)
        tokens = serve(engine, requests, lambda step: scribble(neighbour) if step % 40 == 20 else None)
        assert verdict(expected, tokens).wrong
