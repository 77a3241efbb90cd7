from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.model.attention import cpu
from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cpu import CpuAttention, group_by_length
from tests.support.attention import make_problem
from tests.support.examples import examples

SHAPES = st.builds(
    lambda group, kv_heads, head_dim, block: AttentionShape(group * kv_heads, kv_heads, head_dim, block),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([2, 8, 16]),
    st.integers(1, 8),
)


@given(
    shape=SHAPES,
    decodes=st.lists(st.integers(1, 40), max_size=6),
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60))
def test_any_mix_of_decodes_and_prefills_equals_the_definition(
    shape: AttentionShape, decodes: list[int], prefills: list[tuple[int, int]], seed: int
) -> None:
    if not decodes and not prefills:
        prefills = [(0, 1)]
    problem = make_problem(shape, decodes, prefills, seed=seed)
    torch.testing.assert_close(problem.solve(CpuAttention(shape)).double(), problem.answer, rtol=1e-5, atol=1e-5)


def test_decodes_of_very_different_length_are_grouped_and_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MAX_WASTED_TOKENS", 8)
    shape = AttentionShape(4, 2, 8, 4)
    problem = make_problem(shape, [3, 60, 1, 58, 5, 20], [(7, 5)])
    assert len(group_by_length([3, 60, 1, 58, 5, 20])) == 3
    torch.testing.assert_close(problem.solve(CpuAttention(shape)).double(), problem.answer, rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_the_definition() -> None:
    shape = AttentionShape(9, 3, 64, 16)
    problem = make_problem(shape, [50, 33, 1], [(0, 20), (30, 9), (0, 100)], dtype=torch.bfloat16)
    error = (problem.solve(CpuAttention(shape)).double() - problem.answer).abs()
    assert error.max() < 0.04
    assert error.mean() < 0.004


def test_reading_another_sequences_blocks_is_noticed() -> None:
    shape = AttentionShape(4, 2, 8, 4)
    problem = make_problem(shape, [12, 12], [])
    exchanged = replace(problem.batch, block_tables=problem.batch.block_tables.flip(0))
    wrong = replace(problem, batch=exchanged).solve(CpuAttention(shape))
    assert not torch.allclose(wrong.double(), problem.answer, atol=1e-2)


@given(st.lists(st.integers(1, 10_000), max_size=60))
def test_groups_are_a_partition_within_their_bounds(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert padded - sum(lengths[i] for i in group) <= cpu.MAX_WASTED_TOKENS
        assert padded <= cpu.MAX_GROUP_TOKENS or len(group) == 1


def test_like_lengths_are_one_group_in_the_order_given() -> None:
    assert group_by_length([5, 7, 6]) == [[0, 1, 2]]
