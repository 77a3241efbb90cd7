"""One damaged slot costs exactly the tokens from its block on: a real (tiny, random, fp32) model, faults by seed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from floodplain import SamplingParams
from floodplain.core.request import Request
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from tests.support.calm import MODEL, run_calmly
from tests.support.parity import judge
from tests.support.swap_faults import believes_every_digest
from tests.support.swapping import BLOCK_BYTES, SwapOncePolicy

SEEDS = range(8)
BLOCK_TOKENS, NUM_TOKENS = 16, 24
BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
SWAPPING: dict[str, Any] = {
    "kv_memory": 24 * BLOCK_BYTES, "swap": "host", "swap_memory": 24 * BLOCK_BYTES, "enable_prefix_caching": False,
}  # fmt: skip
"""Swapped blocks do not stay cached on the device, so all of them must be swapped in."""


@dataclass
class Outcome:
    """Of a request that was swapped once; ``place`` is the damaged block's index, of ``num_blocks``."""

    token_ids: list[int]
    place: int | None = None
    num_blocks: int = 0
    num_computed: int = 0
    num_recomputed: int = 0
    num_failed: int = 0


def make_request(seed: int) -> Request:
    dice = Random(seed)
    prompt = tuple(dice.randrange(256) for _ in range(dice.randint(60, 95)))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return Request(request_id=str(seed), prompt_token_ids=prompt, params=params, arrival_s=0.0)


def run_with_damage(request: Request, dice: Random | None) -> Outcome:
    """Run a request; once all of it is in swap space, zero a random slot, or none without dice."""
    with closing(build_engine(EngineConfig(model=MODEL, **BASE, **SWAPPING), SwapOncePolicy())) as engine:
        executor: Any = engine._executor
        slots = executor._swap._tiers[Tier.HOST].slots
        seq, outcome = engine.loop.state.sequences[engine.add(request)], Outcome([])
        while engine.has_unfinished:
            outcome.token_ids += [token for _, delta in engine.step() for token in delta.token_ids]
            engine.loop.check_integrity()
            kept = [*seq.backups, *((seq.tail[0],) if seq.tail else ())]
            if seq.status is Status.SWAPPED and all(one.is_whole for one in kept) and not outcome.num_blocks:
                outcome.num_blocks, outcome.num_computed = len(kept), seq.max_computed
                if dice is not None:
                    outcome.place = dice.randrange(len(kept))
                    slots.words[kept[outcome.place].location.slot] = 0
        outcome.num_recomputed = engine.loop.counters.num_recomputed_tokens
        outcome.num_failed = engine.stats().failed_transfers["digest_mismatch"]
        return outcome


def are_right(outcomes: Sequence[Outcome]) -> list[bool]:
    requests = [make_request(seed) for seed in SEEDS]
    references = run_calmly(requests, **BASE)
    wrong = judge(references, [outcome.token_ids for outcome in outcomes]).wrong
    return [index not in wrong for index in range(len(outcomes))]


def test_a_damaged_slot_costs_exactly_the_tokens_from_its_block_on() -> None:
    outcomes = [run_with_damage(make_request(seed), Random(seed)) for seed in SEEDS]
    for one in outcomes:
        assert one.place is not None
        assert one.num_blocks == -(-one.num_computed // BLOCK_TOKENS) > 3
        assert one.num_recomputed == one.num_computed - one.place * BLOCK_TOKENS
        assert one.num_failed == 1
    assert all(are_right(outcomes))
    assert {0 < one.place < one.num_blocks - 1 for one in outcomes if one.place is not None} == {True, False}


def test_without_damage_nothing_is_computed_again() -> None:
    outcomes = [run_with_damage(make_request(seed), None) for seed in SEEDS]
    assert [one.num_recomputed for one in outcomes] == [one.num_failed for one in outcomes] == [0] * len(SEEDS)
    assert all(one.num_blocks for one in outcomes), "no blocks were swapped out"
    assert all(are_right(outcomes))


def test_damage_that_no_digest_shows_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the tokens depend on the block that was damaged."""
    believes_every_digest(monkeypatch)
    outcomes = [run_with_damage(make_request(seed), Random(seed)) for seed in SEEDS]
    assert [one.num_recomputed for one in outcomes] == [0] * len(SEEDS)
    assert are_right(outcomes).count(False) > len(SEEDS) // 4
