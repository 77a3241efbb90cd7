"""A real (tiny, random, fp32) model of which a random number of layers streams: tokens stay the same.

With several policies, swap space, prefix hits, chunked prompts, preemption by recompute, aborts and slow links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from floodplain import SamplingParams
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.request import Request
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.expansion import Expansion
from floodplain.engine.outputs import EngineStats
from floodplain.memory.layer_line import StepClock
from floodplain.policy.expansion import ExpansionDecision, ExpansionPolicy, ExpansionView
from tests.support.calm import run_calmly
from tests.support.driven import Disturb, Driven
from tests.support.layer_lines import ForgetfulSlots, OrderedLine
from tests.support.parity import Reference
from tests.support.shared_prompts import make_requests

pytestmark = pytest.mark.slow

MODEL, NUM_LAYERS = "dummy:tiny-deep", 12
BLOCK_BYTES = NUM_LAYERS * 4096
"""In fp32: K and V, 16 tokens, 2 heads, 16 elements in each of 12 layers; 16 blocks are a quantum."""
NUM_PROMPTS, NUM_TOKENS = 40, 40
BASE: dict[str, Any] = {"model": MODEL, "dtype": "float32", "max_model_len": 224}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL: dict[str, Any] = {"kv_memory": 40 * BLOCK_BYTES, "kv_expansion": "auto", "expansion_memory": 2**26}


class Die(ExpansionPolicy):
    """Changes to a random number of streamed layers after some steps."""

    def __init__(self, places: Sequence[LayerPlaces], seed: int, chance: float = 0.3) -> None:
        self._places, self._rng, self._chance = list(places), Random(seed), chance
        self.num_changes = 0

    def decide(self, view: ExpansionView) -> ExpansionDecision:
        if self._rng.random() >= self._chance:
            return ExpansionDecision(view.num_streamed)
        self.num_changes += 1
        return ExpansionDecision(self._rng.choice(self._places).num_streamed)


@dataclass
class Run(Driven):
    """An engine whose layers stream, and its outputs."""

    expansions: set[float] = field(default_factory=set)

    @property
    def expansion(self) -> Expansion:
        assert self.engine.expansion is not None
        return self.engine.expansion

    def drive(self, requests: Sequence[Request], disturb: Disturb = lambda one, step: None, *rest: Any) -> EngineStats:
        def note(run: Run, step: int) -> None:
            run.expansions.add(run.expansion.slots.places.expansion)
            disturb(run, step)

        return super().drive(requests, note, *rest)


@contextmanager
def expanding(seed: int | None = 0, *, line: OrderedLine | None = None, **flags: Any) -> Iterator[Run]:
    """Yield an engine that changes its streamed layers by dice; without a seed, its own controller does."""
    engine = build_engine(EngineConfig(**(BASE | SMALL | flags)))
    try:
        run = Run(engine)
        expansion: Any = run.expansion
        if expansion._policy is not None and seed is not None:
            expansion._policy = Die(list(expansion._places.values()), seed)
        if line is not None:
            for layer in expansion.slots.places.streamed:
                line.place(layer, expansion.slots._homes[layer])
            expansion.slots.line.close()
            expansion.slots.line, expansion.slots._clock = line, StepClock(line)
            line.pool = expansion.slots._pool
            expansion._seen = line.stats()
        yield run
    finally:
        engine.close()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(NUM_PROMPTS, 11, GREEDY)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    """Answers of an engine with room for all requests."""
    return run_calmly(requests, **BASE, kv_memory=2**26)


@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "fcfs", "swap": "none"},
        {
            "policy": "fcfs",
            "swap": "none",
            "enable_prefix_caching": False,
            "max_batched_tokens": 70,
            "max_num_seqs": 70,
        },
        {"policy": "cfs", "slice": 4, "kv_memory": 20 * BLOCK_BYTES},
        {"policy": "fair", "slice": 4},
        {"policy": "paced", "block_tokens": 8},
        {"policy": "cfs", "slice": 2, "hardware": "emulated-pcie4"},
    ],
    ids=str,
)
def test_layers_begin_and_end_to_stream_at_random_boundaries(
    flags: dict[str, Any], requests: list[Request], expected: list[Reference]
) -> None:
    with expanding(**flags) as run:
        stats = run.drive(requests)
    verdict = run.verdict(expected)
    assert verdict.is_equal, verdict
    assert len(run.expansions) > 2
    assert sum(stats.preemptions.values()) > 1, "there was room for all"
    assert stats.expansion.loaded_bytes > stats.expansion.written_bytes > 0


@pytest.mark.parametrize("expansion", ["1.5", "6"])
def test_a_fixed_expansion_over_a_slow_link(expansion: str, requests: list[Request], expected: list[Reference]) -> None:
    with expanding(kv_expansion=expansion, policy="cfs") as run:
        run.expansion.slots.line.pace(2e8)
        stats = run.drive(requests)
    verdict = run.verdict(expected)
    assert verdict.is_equal, verdict
    assert stats.expansion.expansion > 0.8 * float(expansion)
    assert stats.expansion.stall_s > 0


def test_clients_that_disconnect_while_layers_stream(requests: list[Request], expected: list[Reference]) -> None:
    rng = Random(3)

    def hang_up(run: Run, step: int) -> None:
        alive = [seq_id for seq_id in run.engine.loop.state.sequences if seq_id not in run.aborted]
        if alive and rng.random() < 0.2 and len(run.aborted) < NUM_PROMPTS // 4:
            run.hang_up(rng.choice(alive))

    with expanding(policy="paced", line=OrderedLine(NUM_LAYERS)) as run:
        run.drive(requests[: NUM_PROMPTS // 2], hang_up)
    verdict = run.verdict(expected)
    assert verdict.is_equal, verdict
    assert len(run.aborted) > 3


@pytest.mark.parametrize("expansion", ["6", "auto"])
def test_a_prompt_longer_than_the_pool(expansion: str) -> None:
    """The prompt is four times as long as the pool holds while no layer streams."""
    rng = Random(5)
    num_tokens = 2_000
    prompt = tuple(rng.randrange(256) for _ in range(num_tokens))
    request = Request(request_id="long", prompt_token_ids=prompt, params=GREEDY, arrival_s=0.0)
    long = {"max_model_len": 2_048, "max_batched_tokens": 512, "policy": "fcfs", "swap": "none"}
    calm = run_calmly([request], **(BASE | long))
    flags: dict[str, Any] = long | {"long_prompts": True, "kv_expansion": expansion, "max_model_len": 2_048}
    with expanding(**(flags | {"kv_memory": 32 * BLOCK_BYTES})) as run:
        stats = run.drive([request])
    assert run.verdict(calm).is_equal
    assert stats.num_blocks * 16 >= num_tokens >= 3.9 * 32 * 16


def test_auto_grows_while_memory_is_short_and_comes_back_when_it_is_not(
    requests: list[Request], expected: list[Reference]
) -> None:
    """Copies are hidden: they take a nanosecond a byte, which is little beside the compute of a tiny model."""
    with expanding(None, line=OrderedLine(NUM_LAYERS), policy="fcfs", swap="none") as run:
        stats = run.drive(requests)
        assert run.verdict(expected).is_equal
        assert max(run.expansions) > 1.0 and stats.expansion.loaded_bytes > 0
        calm = replace(requests[0], params=replace(GREEDY, max_tokens=200), prompt_token_ids=(1, 2, 3))
        for _ in range(2):  # the controller looks back over some hundred steps
            stats = run.drive([calm])
        assert stats.expansion.expansion == 1.0 and stats.expansion.num_streamed == 0
        assert stats.num_blocks >= 40 and stats.expansion.limited == "memory is not short"


@pytest.mark.parametrize("fault", ["wait", "settle", "write"])
def test_control_each_order_is_needed(fault: str, requests: list[Request], expected: list[Reference]) -> None:
    with expanding(policy="cfs", slice=2, kv_expansion="2.9", line=OrderedLine(NUM_LAYERS)) as run:
        slots: Any = run.expansion.slots
        slots.__class__, slots.fault = ForgetfulSlots, fault
        run.drive(requests)
    assert not run.verdict(expected).is_equal
