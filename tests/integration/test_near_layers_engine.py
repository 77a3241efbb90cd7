"""An engine whose layers stream from a neighbour's memory: a real (tiny, fp32) model, coordinator and lender.

The neighbour lends, recalls at any step, and is killed: tokens are those of an engine whose layers never stream,
and no borrowed memory stays taken.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest

from floodplain.core.request import Request
from floodplain.engine.shell import Engine
from floodplain.lending import peer_tier
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.near_layers import NearLayers
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.layer_slots import NearCopies
from floodplain.policy.expansion import ExpansionDecision, ExpansionLimit
from tests.integration.test_expansion_engine import BASE, BLOCK_BYTES, GREEDY, Run, expanding
from tests.support import forks
from tests.support.calm import run_calmly
from tests.support.driven import Disturb
from tests.support.lending import Neighbour, coordinating, step_until
from tests.support.parity import Reference
from tests.support.shared_prompts import make_requests
from tests.support.swapping import ImpatientPolicy
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow

NUM_PAGES = 160
PEER: dict[str, Any] = {"expansion_tier": "peer", "lease_look": 0.001, "kv_memory": 40 * BLOCK_BYTES}
LENDER = """
import signal, sys
from floodplain.lending import agent
from tests.support.lending import Neighbour
agent.BEAT_S = 0.1
neighbour = Neighbour(sys.argv[1], int(sys.argv[2]), 60.0)
neighbour.lend(int(sys.argv[2]))
print(neighbour.name, flush=True)
signal.pause()  # until it is killed
"""


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(16, 5, GREEDY)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    return run_calmly(requests, **BASE, kv_memory=2**26)


@contextmanager
def borrowing(seed: int = 0, *, deadline_s: float = HANG_S, **flags: Any) -> Iterator[tuple[Neighbour, Run]]:
    """A neighbour that lends nothing yet, and an engine that has joined."""
    with coordinating() as url, closing(Neighbour(url, NUM_PAGES, deadline_s)) as neighbour:
        with expanding(seed, coordinator=url, **(PEER | flags)) as run:
            wait_until(lambda: run.engine.neighbours and run.engine.neighbours.agent.membership.has_joined)
            yield neighbour, run
        assert neighbour.taken_pages == 0, "borrowed memory stays taken"


def near_of(engine: Engine) -> NearLayers:
    assert engine.neighbours is not None and engine.neighbours.near_layers is not None
    return engine.neighbours.near_layers


def count_near(run: Run) -> int:
    return run.engine.stats().expansion.num_near


def go_round(run: Run, requests: Sequence[Request], disturb: Disturb, is_over: Callable[[], bool]) -> int:
    """Run all requests repeatedly until ``is_over``; return the number of rounds."""
    num_rounds, end_s = 0, time.monotonic() + HANG_S
    while not num_rounds or not is_over():
        run.drive(requests, disturb)
        num_rounds += 1
        assert time.monotonic() < end_s, "it never happened"
    return num_rounds


@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "cfs", "slice": 4, "kv_memory": 20 * BLOCK_BYTES},
        {"policy": "paced", "hardware": "emulated-pcie4"},
    ],
    ids=str,
)
def test_tokens_are_right_while_a_neighbour_lends_and_recalls(
    flags: dict[str, Any], requests: list[Request], expected: list[Reference]
) -> None:
    with borrowing(**flags) as (neighbour, run):
        rng, totals = Random(1), near_of(run.engine).totals

        def change_its_mind(run: Run, step: int) -> None:
            if step % 30 == 0:
                neighbour.lend(rng.choice([0, NUM_PAGES // 4, NUM_PAGES, NUM_PAGES]))

        num_rounds = go_round(
            run, requests, change_its_mind,
            lambda: totals.num_returned > 5 and run.engine.stats().expansion.near_loaded_bytes > 2**20,
        )  # fmt: skip
        stats = run.engine.stats().expansion
        verdict = run.verdict(list(expected) * num_rounds)
    assert verdict.is_equal, verdict
    assert 0 < stats.near_loaded_bytes < stats.loaded_bytes
    assert totals.num_forced == totals.num_refused == 0


def test_a_prompt_of_four_pools_from_a_neighbour() -> None:
    """All streamed layers have near copies; over 90 % of loaded bytes come from them."""
    prompt = tuple(Random(5).randrange(256) for _ in range(2_000))
    request = Request(request_id="long", prompt_token_ids=prompt, params=GREEDY, arrival_s=0.0)
    long = {"max_model_len": 2_048, "max_batched_tokens": 512, "policy": "fcfs", "swap": "none"}
    flags = long | {"kv_memory": 32 * BLOCK_BYTES, "kv_expansion": "6", "long_prompts": True}
    with borrowing(**flags) as (neighbour, run):
        neighbour.lend(NUM_PAGES)
        step_until(run.engine, lambda: count_near(run) == run.expansion.slots.places.num_streamed)
        stats = run.drive([request])
        verdict = run.verdict(run_calmly([request], **(BASE | long)))
    assert verdict.is_equal, verdict
    assert stats.expansion.near_loaded_bytes > 0.9 * stats.expansion.loaded_bytes > 0


def test_a_recall_is_obeyed_at_once_by_a_loop_that_stands_still(
    requests: list[Request], expected: list[Reference]
) -> None:
    with borrowing(policy="fcfs", kv_expansion="2.9", deadline_s=2 * HANG_S) as (neighbour, run):
        neighbour.lend(NUM_PAGES)
        step_until(run.engine, lambda: count_near(run) == run.expansion.slots.places.num_streamed > 4)

        def stand_still(run: Run, step: int) -> None:
            if step == 20:
                assert run.engine.stats().expansion.near_loaded_bytes > 0
                neighbour.lend(0)
                wait_until(lambda: not neighbour.taken_pages)  # long before the deadline
                assert not count_near(run)

        run.drive(requests, stand_still)
        verdict = run.verdict(expected)
        assert near_of(run.engine).totals.num_forced == 0
    assert verdict.is_equal, verdict


@contextmanager
def lending_process(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(a process that lends, the name of its device)."""
    command = [sys.executable, "-c", LENDER, url, str(NUM_PAGES)]
    with forks.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_lender_that_is_killed_loses_nothing(requests: list[Request], expected: list[Reference]) -> None:
    """The borrower keeps its pages until the device is forgotten; then layers load from host copies."""
    with ExitStack() as stack:
        url = stack.enter_context(coordinating())
        process, name = stack.enter_context(lending_process(url))
        run = stack.enter_context(expanding(0, coordinator=url, policy="cfs", kv_expansion="2.9", **PEER))
        step_until(run.engine, lambda: count_near(run) > 4)

        client = stack.enter_context(closing(CoordinatorClient(url)))

        def has_heard(run: Run) -> bool:
            assert run.engine.neighbours is not None
            run.engine.neighbours.agent.membership.on_change()
            return not count_near(run)

        def kill(run: Run, step: int) -> None:
            if step == 10:
                process.send_signal(signal.SIGKILL)
                process.wait()
            elif step == 20:
                assert run.engine.stats().expansion.num_near > 4
                assert client.forget(name).member is not None
            elif step == 25:
                wait_until(lambda: has_heard(run))  # on the watch's thread

        run.drive(requests, kill)
        verdict = run.verdict(expected)
        stats = run.engine.stats().expansion
    assert verdict.is_equal, verdict
    assert stats.num_near == 0 < stats.near_loaded_bytes < stats.loaded_bytes


def test_swap_space_and_layers_borrow_side_by_side(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "CHUNK_BYTES", PAGE_BYTES)
    flags = {"swap": "peer", "peer_memory": 4 * PAGE_BYTES, "swap_memory": 64 * BLOCK_BYTES, "kv_expansion": "2.9"}
    with borrowing(**flags) as (neighbour, run):
        policy: Any = ImpatientPolicy()
        run.engine.loop.policy = policy
        neighbours = run.engine.neighbours
        assert neighbours is not None and neighbours.peer_tier is not None
        peer, near = neighbours.peer_tier, near_of(run.engine)
        neighbour.lend(NUM_PAGES)
        step_until(run.engine, lambda: count_near(run) > 4 and peer.totals.num_granted > 3)
        rng = Random(2)

        def change_its_mind(run: Run, step: int) -> None:
            if step % 40 == 0:
                neighbour.lend(rng.choice([0, NUM_PAGES // 2, NUM_PAGES]))

        num_rounds = go_round(run, requests, change_its_mind, lambda: near.totals.num_returned > 5)
        stats = run.engine.stats()
        verdict = run.verdict(list(expected) * num_rounds)
        assert peer.totals.num_refused == near.totals.num_refused == 0
        assert stats.borrowed_leases["granted"] == peer.totals.num_granted + near.totals.num_granted
    assert verdict.is_equal, verdict
    assert stats.swap_bytes["out", "peer"] > 0 < stats.expansion.near_loaded_bytes


def test_control_a_swap_in_leaves_stale_blocks(
    requests: list[Request], expected: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: blocks that a swap-in wrote must become stale in near copies."""
    monkeypatch.setattr(NearCopies, "note_changed", lambda self, blocks: None)
    with borrowing(policy="cfs", slice=2, kv_expansion="2.9", kv_memory=20 * BLOCK_BYTES) as (neighbour, run):
        neighbour.lend(NUM_PAGES)
        step_until(run.engine, lambda: count_near(run) == run.expansion.slots.places.num_streamed)
        run.drive(requests)
        assert run.engine.stats().preemptions["swap"] > 0
    assert not run.verdict(expected).is_equal


def test_spare_copies_are_wanted_where_loads_from_home_would_show() -> None:
    """Otherwise a slow host link would keep the policy from using a neighbour's faster one."""
    with expanding(policy="fcfs", swap="none") as run:
        expansion: Any = run.expansion
        home_bytes_s = 1e9
        expansion.expect_bandwidth(home_bytes_s)
        for limited, wanted in ((ExpansionLimit.MEMORY_SUFFICES, 0), (ExpansionLimit.COPIES_SHOW, 4)):
            expansion._policy.decide = partial(lambda decision, view: decision, ExpansionDecision(0, limited))
            run.engine.step()
            assert expansion.num_wanted_copies == wanted
        for num_copies, factor in ((3, 1), (4, 2), (0, 1)):
            expansion.expect_copies(num_copies, 2 * home_bytes_s)
            assert expansion._link_bytes_s == factor * home_bytes_s
