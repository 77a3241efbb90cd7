"""A real (tiny, random, fp32) model whose KV is swapped out and in at random: greedy tokens stay the same.

The policy does anything that a view allows. Copies run on their own threads, so runs differ. In every run, tokens are
those of an undisturbed engine, the ledgers balance after every step, and no block stays in use. Failed copies, damaged
slots and aborted requests are in ``test_swap_proof.py``.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, cast

import pytest

from floodplain import SamplingParams
from floodplain.core.errors import InvariantError
from floodplain.core.plan import StepPlan, Transfer, TransferKind
from floodplain.core.request import Request, SeqId
from floodplain.core.tiers import Location, Tier
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from tests.support.calm import run_calmly
from tests.support.parity import Reference
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy, Swapping

pytestmark = pytest.mark.slow

NUM_BLOCKS, NUM_SLOTS = 24, 64
NUM_PROMPTS, NUM_TOKENS = 20, 24
BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
SWAPPING: dict[str, Any] = {
    "kv_memory": NUM_BLOCKS * BLOCK_BYTES, "swap": "host", "swap_memory": NUM_SLOTS * BLOCK_BYTES,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def as_requests(prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Greedy requests, in this order."""
    return [
        Request(request_id=str(index), prompt_token_ids=prompt, params=GREEDY, arrival_s=float(index))
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def swapping(**flags: Any) -> Iterator[Swapping]:
    engine = build_engine(EngineConfig(model="dummy:tiny-llama", **(BASE | SWAPPING | flags)))
    try:
        engine.loop.policy = ImpatientPolicy()
        yield Swapping(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """1 to 100 random tokens; every fourth prompt begins with 40 tokens of the one before it."""
    rng = Random(7)
    some = [[rng.randrange(256) for _ in range(rng.randrange(1, 61))] for _ in range(NUM_PROMPTS)]
    for index in range(3, NUM_PROMPTS, 4):
        some[index][:0] = (some[index - 1] * 40)[:40]
    return [tuple(prompt) for prompt in some]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[Reference]:
    """The answers of an engine with room for all requests."""
    return run_calmly(as_requests(prompts), **BASE)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"swap_memory": 5 * BLOCK_BYTES},
        {"enable_prefix_caching": False},
        {"block_tokens": 8, "max_batched_tokens": 37, "max_num_seqs": 37},
        {"hardware": "emulated-pcie4"},
        {"hardware": "emulated-c2c", "max_num_seqs": 5},
    ],
    ids=str,
)
def test_swapped_backed_up_and_restored(
    flags: dict[str, Any], prompts: list[tuple[int, ...]], expected: list[Reference]
) -> None:
    with swapping(**flags) as run:
        stats = run.drive(as_requests(prompts))
    verdict = run.verdict(expected)
    assert verdict.is_equal, verdict
    assert stats.preemptions["swap"] > 3
    assert stats.swap_bytes["out", "host"] > 3 * BLOCK_BYTES < stats.swap_bytes["in", "host"]
    assert 0 < stats.backup_bytes < stats.swap_bytes["out", "host"]
    assert "swap_memory" not in flags or run.num_refusals > 10, "it was large enough"
    assert not any(stats.failed_transfers.values()) and not run.engine.loop.counters.num_failed_transfers


def test_nothing_is_left_of_a_swap_space_closed_in_the_middle(prompts: list[tuple[int, ...]]) -> None:
    with swapping(hardware="emulated-pcie4") as run:
        engine = run.engine
        for request in as_requests(prompts):
            run.add(request)
        executor, slots = cast(Any, engine._executor), weakref.ref(run.slots)
        while executor._swap.num_in_flight < 3:
            engine.step()
        engine.close()
        engine.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy-")]
        with pytest.raises(InvariantError, match="closed"):
            executor.execute(StepPlan(0))
        gc.collect()
        assert slots() is None


def test_a_runner_without_swap_space_refuses_transfers() -> None:
    engine = build_engine(EngineConfig(model="dummy:tiny-llama", kv_memory=2**18, **(BASE | {"swap": "none"})))
    transfer = Transfer(1, TransferKind.SWAP_IN, SeqId(0), (0,), (Location(Tier.HOST, 0),))
    with pytest.raises(InvariantError, match="cannot begin in this swap space"):
        engine._executor.execute(StepPlan(0, transfers=(transfer,)))
    engine.close()
