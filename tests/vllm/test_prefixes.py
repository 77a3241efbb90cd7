"""Tokens under pressure with vLLM's prefix cache: blocks are shared, and some are revived on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from vllm import LLM

from floodplain.core.plan import Decision
from floodplain.core.view import View
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    close,
    controller_of,
    drive,
    make_load,
    make_ours,
    scheduler_of,
)  # fmt: skip
from tests.vllm.storm import StormPolicy

LOAD = make_load(seed=1, num_requests=12, num_common=100)
"""Twelve requests that begin with the same 100 tokens: three blocks, and a part of the fourth."""


@pytest.fixture(scope="module")
def engine(folder: Path, expected: dict[int, list[int]]) -> Iterator[LLM]:
    flags = {"num_gpu_blocks_override": 36, "enable_prefix_caching": True}
    llm = make_ours(folder, {"policy": "paced", "swap_memory": "256MiB"}, skip_tokenizer_init=True, **flags)
    yield llm
    close(llm)


@pytest.mark.quick
def test_tokens_are_the_same_where_prefixes_are_shared(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    found: list[int] = []
    controller_of(llm).watchers.append(lambda view, now, _: found.extend(row.num_cached_tokens for row in view.waiting))
    assert drive(llm, load).tokens == expected
    assert max(found) >= 96, "the policy sees what requests will find on the device"


@pytest.mark.quick
def test_what_is_kept_of_a_view_agrees_with_vllms_blocks(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """Exclusive blocks and cached prefixes of each view equal an independent count."""
    scheduler, seen = scheduler_of(llm), Counter[str]()
    scheduler.policy_object = StormPolicy(seed=6, chance=0.1)
    pool, by_id = scheduler.finder.pool, controller_of(llm).roster.by_id

    def count(view: View, now: float, decision: Decision) -> None:
        for row in view.running:
            [table] = scheduler.finder.tables(by_id[row.seq_id].request.request_id)
            assert row.exclusive_blocks == sum(block.ref_cnt == 1 for block in table)
            seen["shared"] += row.exclusive_blocks < row.num_blocks
        for row in (*view.waiting, *view.swapped):
            request = by_id[row.seq_id].request
            hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]
            found = [*takewhile(bool, (pool.get_cached_block(block_hash, [0]) for block_hash in hashes))]
            assert row.num_cached_tokens == BLOCK_TOKENS * len(found)
            assert row.num_shared_blocks == sum(block.ref_cnt > 0 for [block] in found)
            seen["cached"] += bool(found)

    controller_of(llm).watchers.append(count)
    assert drive(llm, load).tokens == expected
    assert min(seen["shared"], seen["cached"]) > 20


@pytest.mark.parametrize("seed", range(3))
def test_tokens_survive_a_storm_where_prefixes_are_shared(
    llm: LLM, load: Load, expected: dict[int, list[int]], seed: int
) -> None:
    policy = scheduler_of(llm).policy_object = StormPolicy(seed, chance=0.1)
    run = drive(llm, load)
    assert run.tokens == expected
    assert policy.num_sent_away > 30 and run.resumed


def test_other_weights_make_all_copies_worthless(llm: LLM, load: Load, expected: dict[int, list[int]]) -> None:
    """As after an update of the model: backups are forgotten, and their tokens recomputed."""
    scheduler = scheduler_of(llm)
    scheduler.policy_object = StormPolicy(seed=5, chance=0.1, recompute=0.0)
    num_kept: list[int] = []

    def reset(step: int) -> None:
        if step % 10 == 9:
            num_kept.append(sum(len(one.backups) for one in controller_of(llm).roster))
            assert scheduler.reset_connector_cache()
            assert not any(one.has_kv for one in controller_of(llm).roster)

    assert drive(llm, load, each_step=reset).tokens == expected
    assert max(num_kept) > 10
