"""An engine that lends its idle KV pool: a real (tiny, fp32) model, a real coordinator, consumers that allocate.

Tokens are those of an engine that never lent, and at every boundary the pool and its neighbours fit on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from random import Random
from typing import Any

import pytest

from floodplain.core.errors import InvariantError
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.memory.host.device_file import PAGE_BYTES
from floodplain.memory.kv_pool import KVPool
from tests.support.calm import run_calmly
from tests.support.lending import QUICK, Consumer, Producer, Ticks, borrowing, coordinating
from tests.support.parity import Reference, Verdict, judge
from tests.support.swapping import BLOCK_BYTES
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow

NUM_BLOCKS = 256
"""Sixteen quanta of sixteen; a request needs up to eight."""
LONGEST = 128
BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": LONGEST}
POOL: dict[str, Any] = {"kv_memory": NUM_BLOCKS * BLOCK_BYTES, "swap": "none", "policy": "fcfs"}
NUM_STEPS = 400
"""At least: leases span many steps, since a step takes 1 to 2 ms, and an exchange with a real coordinator 20 ms."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def make_request(index: int, prompt: Sequence[int], params: SamplingParams) -> Request:
    return Request(request_id=str(index), prompt_token_ids=tuple(prompt), params=params, arrival_s=float(index))


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with coordinating() as url:
        yield url


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = Random(11)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(40, 100))] for _ in range(48)]
    return [make_request(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    return run_calmly(requests, **BASE)


def producer_flags(url: str, **flags: Any) -> EngineConfig:
    return EngineConfig(model="dummy:tiny-llama", **(BASE | POOL | {"coordinator": url, "lend": "auto"} | flags))


@contextmanager
def producing(url: str, **flags: Any) -> Iterator[Producer]:
    """A lending engine whose clock advances at each reading; its pool moves two quanta at a boundary."""
    with closing(build_engine(producer_flags(url, **flags), lending=QUICK)) as engine:
        engine.clock = Ticks()
        producer = Producer(engine)
        producer.pool._step_blocks = 2 * engine.loop.state.ledger.quantum_blocks
        yield producer


class Load:
    """Sends the same requests repeatedly, and keeps their tokens."""

    def __init__(self, producer: Producer, requests: Sequence[Request]) -> None:
        self.outputs: dict[SeqId, list[int]] = {}
        self._producer, self._engine = producer, producer.engine
        self._requests = requests

    def step(self, num_live: int, *consumers: Consumer) -> None:
        """Take a step that begins with at least ``num_live`` requests; then let consumers act."""
        while len(self._engine._alive) < num_live:
            request = self._requests[len(self.outputs) % len(self._requests)]
            self.outputs[self._engine.add(request)] = []
        for seq_id, delta in self._engine.step():
            self.outputs[seq_id] += delta.token_ids
        self._producer.check()
        self._producer.wake()
        for consumer in consumers:
            consumer.turn()

    def step_until(self, is_done: Callable[[], object], num_live: int, *consumers: Consumer) -> None:
        """Step under a constant load until ``is_done``; a busy machine may delay the coordinator for seconds."""
        end_s = time.monotonic() + HANG_S
        while True:
            self.step(num_live, *consumers)
            if is_done():
                return
            assert time.monotonic() < end_s, "it never came to that"

    def drain(self, *consumers: Consumer) -> None:
        """Step until no request is live."""
        self.step_until(lambda: not self._engine.has_unfinished, 0, *consumers)

    def verdict(self, expected: Sequence[Reference]) -> Verdict:
        """Judge all requests that were sent."""
        references = [expected[seq_id % len(expected)] for seq_id in self.outputs]
        return judge(references, list(self.outputs.values()))


def test_the_story_of_a_lender(coordinator: str, requests: list[Request], expected: list[Reference]) -> None:
    """AQUA's Figure 12: when calm it lends and neighbours allocate; in a burst it recalls and grows; then calm."""
    with producing(coordinator) as producer:
        load, device = Load(producer, requests), producer.visit()
        with borrowing(Consumer(coordinator, device, 8 * PAGE_BYTES)) as consumer:

            def is_lent() -> bool:
                return len(consumer.held) >= 3 and producer.num_lent_bytes >= 24 * PAGE_BYTES

            load.step_until(is_lent, 1, consumer)
            assert producer.num_blocks < NUM_BLOCKS
            assert producer.pool.foreign_bytes == device.num_owned_pages * PAGE_BYTES >= 24 * PAGE_BYTES
            assert set(producer.engine.stats().lease_bytes) == {("producer", "consumer")}

            load.step_until(lambda: producer.is_whole, 40, consumer)
            assert not consumer.held
            assert consumer.num_freed >= 3

            load.step_until(is_lent, 2, consumer)
            load.drain(consumer)
        producer.lend(0)
        load.step_until(lambda: producer.is_whole, 0)
        stats = producer.engine.stats()
    verdict = load.verdict(expected)
    assert verdict.is_equal, verdict
    assert stats.num_recalls >= 3
    assert all(0 < seconds < HANG_S for seconds in stats.recall_times_s)
    assert consumer.num_refused == stats.num_failed_growths == 0


def test_consumers_are_given_the_recall_deadline_of_the_flag(coordinator: str) -> None:
    with producing(coordinator, recall_deadline=2 * HANG_S) as producer:
        producer.lend(NUM_BLOCKS // 2)
        load = Load(producer, [])
        with borrowing(Consumer(coordinator, producer.visit(), 8 * PAGE_BYTES)) as consumer:
            load.step_until(lambda: bool(consumer.held), 0, consumer)
            producer.lend(0)
            load.step_until(lambda: consumer.agent.membership.to_free(), 0)
            [left_s, *_] = consumer.agent.membership.to_free().values()
            assert HANG_S < left_s <= 2 * HANG_S


SWAP = {"swap": "host", "swap_memory": 64 * BLOCK_BYTES}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"enable_prefix_caching": False},
        SWAP | {"policy": "cfs", "slice": 2},
        SWAP | {"policy": "fair", "slice": 2},
        SWAP | {"policy": "paced", "hardware": "emulated-pcie4"},
    ],
    ids=str,
)
def test_tokens_stay_what_they_are_however_the_pool_is_lent(
    flags: dict[str, Any], coordinator: str, requests: list[Request], expected: list[Reference]
) -> None:
    """Targets ignore the load, down to the floor; at times more requests are live than the whole pool holds."""
    with producing(coordinator, **flags) as producer:
        most = NUM_BLOCKS - producer.pool.least_blocks
        producer.lend(most, 0, most, 40, most // 2, 0)
        load, sizes = Load(producer, requests), set()
        with borrowing(Consumer(coordinator, producer.visit(), 3 * PAGE_BYTES)) as consumer:
            steps = count()

            def step() -> bool:
                """Take a step; return whether the pool had many sizes, and memory was borrowed."""
                load.step(ebb_and_flow(next(steps)), consumer)
                sizes.add(producer.num_blocks)
                return len(sizes) > 4 and min(sizes) <= NUM_BLOCKS // 2 and consumer.most_pages > 0

            for _ in range(NUM_STEPS):
                step()
            wait_until(step)
            load.drain(consumer)
        state = producer.engine.loop.state
        assert state.ledger.num_available == state.ledger.num_blocks
    verdict = load.verdict(expected)
    assert verdict.is_equal, verdict
    assert not consumer.num_refused


def ebb_and_flow(step: int) -> int:
    """Number of live requests: more than the pool holds, then two, which are scattered over it."""
    return 44 if step % 60 < 20 else 2


@pytest.mark.parametrize("moves_blocks", [True, False])
def test_requests_scattered_over_the_pool_survive_its_shrinking(
    moves_blocks: bool,
    coordinator: str,
    requests: list[Request],
    expected: list[Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: if moved blocks are not copied, tokens differ."""
    if not moves_blocks:
        monkeypatch.setattr(KVPool, "move_blocks", lambda self, moves: None)
    with producing(coordinator, enable_prefix_caching=False) as producer:
        engine, load = producer.engine, Load(producer, requests)
        load.step(32)
        for seq_id in list(load.outputs):
            if seq_id % 8:
                engine.finish(seq_id, FinishReason.ABORT)
                del load.outputs[seq_id]
        lender = producer.lend(NUM_BLOCKS)
        lender.at_boundary(0.0)
        while lender.is_moving:
            lender.at_boundary(0.0)
        load.drain()
    assert producer.num_blocks <= NUM_BLOCKS // 4
    assert producer.num_moved_blocks > 4
    assert len(load.outputs) == 4
    assert load.verdict(expected).is_equal is moves_blocks


LONG = {"max_model_len": 512, "kv_memory": 256 * BLOCK_BYTES}
"""A request needs up to two quanta, so that the pool could be smaller than the longest one."""


def serve_longest(url: str, least_blocks: int) -> None:
    """Serve four of the longest requests from a pool that shrinks to ``least_blocks`` before their first step."""
    rng = Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    longest = [make_request(i, [rng.randrange(256) for _ in range(472)], params) for i in range(4)]
    with producing(url, **LONG) as producer:
        assert producer.pool.least_blocks == 32
        producer.pool.least_blocks = least_blocks
        lender = producer.lend(256 - least_blocks)
        outputs = {producer.engine.add(request): 0 for request in longest}
        lender.at_boundary(0.0)
        while lender.is_moving:
            lender.at_boundary(0.0)
        assert producer.num_blocks == -(-least_blocks // 16) * 16
        while producer.engine.has_unfinished:
            for seq_id, delta in producer.engine.step():
                outputs[seq_id] += len(delta.token_ids)
            producer.check()
        assert set(outputs.values()) == {40}


def test_the_longest_requests_are_served_from_the_smallest_pool(coordinator: str) -> None:
    """FCFS fails if the pool is smaller than a live request; the floor is just enough to avoid that."""
    serve_longest(coordinator, 32)
    with pytest.raises(InvariantError, match="runs nothing while requests are alive"):
        serve_longest(coordinator, 1)
