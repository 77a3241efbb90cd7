"""Layers cut into stages: against all cuts, tried one by one."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import SHAPES
from floodplain.cost.pipeline import ChunkPrice, StageMemory, cost_by_shape, head_layers, split_layers
from tests.support.examples import examples

MEMORIES = st.builds(StageMemory, st.integers(0, 4000), st.integers(1, 60), st.integers(1, 9))


def all_cuts(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[b - a for a, b in pairwise((0, *cut, num_layers))] for cut in cuts]


def dearest(counts: list[int], head_cost: float) -> float:
    return max(*counts[:-1], counts[-1] + head_cost) if counts[:-1] else counts[-1] + head_cost


@settings(max_examples=examples(150))
@given(
    num_layers=st.integers(1, 10),
    memories=st.lists(MEMORIES, min_size=1, max_size=4),
    head_cost=st.sampled_from([0.0, 0.5, 1.0, 2.83, 8.0]),
    slack=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
)
def test_no_cut_as_even_has_more_blocks_and_none_with_as_many_is_more_even(
    num_layers: int, memories: list[StageMemory], head_cost: float, slack: float
) -> None:
    if num_layers < len(memories):
        with pytest.raises(UserError, match=f"{num_layers} layers cannot be a pipeline of {len(memories)} stages"):
            split_layers(num_layers, memories, head_cost, slack)
        return

    def blocks(counts: list[int]) -> int:
        return min(memory.count_blocks(count) for memory, count in zip(memories, counts, strict=True))

    stages = split_layers(num_layers, memories, head_cost, slack)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    found = [len(stage) for stage in stages]
    cuts = all_cuts(num_layers, len(memories))
    limit = (1 + slack) * min(dearest(counts, head_cost) for counts in cuts) + 1e-6
    even = [counts for counts in cuts if dearest(counts, head_cost) <= limit]
    assert dearest(found, head_cost) <= limit
    most = max(map(blocks, even))
    assert blocks(found) == most
    best = min(dearest(counts, head_cost) for counts in even if blocks(counts) == most)
    assert dearest(found, head_cost) == pytest.approx(best)


def cut_smollm2(slack: float) -> list[int]:
    shape = SHAPES["smollm2-135m"]
    block_bytes = 2 * shape.kv_size * 4 * 16
    memory = StageMemory(30 * (512 * block_bytes + shape.layer_bytes(4)), shape.layer_bytes(4), block_bytes)
    return [len(stage) for stage in split_layers(30, [memory, memory], head_layers(shape), slack)]


def test_the_head_of_a_small_model_weighs_eight_layers() -> None:
    assert head_layers(SHAPES["smollm2-135m"]) == pytest.approx(8.0, abs=0.01)
    assert head_layers(SHAPES["qwen2.5-14b"]) == pytest.approx(2.83, abs=0.01)
    assert cut_smollm2(0.0) == [19, 11] and cut_smollm2(0.1) == [18, 12] and cut_smollm2(0.5) == [15, 15]


def test_a_chunk_costs_the_same_however_it_is_cut() -> None:
    price = ChunkPrice(cost_by_shape(SHAPES["smollm2-135m"]))
    assert price(100, 30) + price(130, 70) == pytest.approx(price(100, 100))
    assert price(0, 1) == pytest.approx(1.0, abs=0.001)
