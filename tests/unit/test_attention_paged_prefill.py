"""FlashInfer prefills: when they are used, and their arguments, which a fake after the manual checks."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cuda import CudaAttentionPlan
from floodplain.model.attention.paged_prefill import (
    DISABLE_VARIABLE,
    FlashInferPrefill,
    open_flashinfer,
    page_segments,
    refuse_flashinfer,
    workspace_bytes,
)
from floodplain.model.batch import PrefillSegment
from tests.support.attention import Problem, attention_by_definition, make_problem

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 64, 5)
PREFILLS = [(0, 7), (13, 4), (5, 5), (0, 1), (9, 1), (4, 1)]
"""Whole prompts, later chunks and single tokens; contexts that end within a block and at its end."""


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` as docs.flashinfer.ai/api/prefill.html describes it, in float64."""

    num_plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.dtype, kv_layout, backend) == (torch.uint8, "NHD", "fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        **sizes: Any,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 and array.dim() == 1 for array in arrays)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.queries, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last_page_lens = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self.sizes = SimpleNamespace(**sizes)
        assert self.sizes.causal
        assert self.sizes.sm_scale == self.sizes.head_dim_qk**-0.5
        self.num_plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        assert q.shape == out.shape == (self.queries[-1], sizes.num_qo_heads, sizes.head_dim_qk)
        assert paged_kv_cache.shape[1:] == (2, sizes.page_size, sizes.num_kv_heads, sizes.head_dim_qk)
        assert q.dtype == sizes.q_data_type
        assert paged_kv_cache.dtype == sizes.kv_data_type
        assert out.is_contiguous()
        for index, last_page_len in enumerate(self.last_page_lens):
            assert 1 <= last_page_len <= sizes.page_size
            pages = self.indices[self.pages[index] : self.pages[index + 1]]
            num_tokens = (len(pages) - 1) * sizes.page_size + last_page_len
            context = paged_kv_cache[pages].transpose(1, 2).flatten(0, 1)[:num_tokens]
            rows = slice(self.queries[index], self.queries[index + 1])
            out[rows] = attention_by_definition(q[rows], context).view_as(out[rows]).to(out.dtype)
        return out


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


def open_fake(shape: AttentionShape = SHAPE, dtype: torch.dtype = torch.float16) -> FlashInferPrefill:
    return FlashInferPrefill(FLASHINFER, shape, dtype, CPU, 1)


def solve(problem: Problem, segments: tuple[PrefillSegment, ...] | None = None) -> torch.Tensor:
    """Attention of a problem without decodes; ``segments`` replaces its prefills."""
    batch = problem.batch if segments is None else replace(problem.batch, prefills=segments)
    kv = problem.kv.clone()
    plan = CudaAttentionPlan(batch, SHAPE, 1, open_fake())
    plan.write(kv, problem.new_kv)
    return plan.attend(problem.q, problem.new_kv, kv)


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_type", "dtype", "head_dim", "variable", "spec", "reason"),
    [
        *(("cuda", dtype, dim, "", True, None) for dtype in (torch.float16, torch.bfloat16) for dim in (64, 128, 256)),
        ("cpu", torch.float16, 64, "", True, "cpu"),
        ("cuda", torch.float32, 64, "", True, "float32"),
        *(("cuda", torch.float16, dim, "", True, str(dim)) for dim in (16, 80, 96)),
        ("cuda", torch.float16, 64, "", None, "not installed"),
        ("cuda", torch.float16, 64, "1", True, DISABLE_VARIABLE),
    ],
)
def test_flashinfer_takes_half_precision_and_its_head_sizes_or_says_why_not(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    variable: str,
    spec: object,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, variable)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    refusal = refuse_flashinfer(device_type, dtype, head_dim)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_a_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="floodplain")
    assert open_flashinfer(SHAPE, torch.bfloat16, CPU, 1) is None
    assert "prefills are computed by torch, not FlashInfer: it does not run on cpu" in caplog.text


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_segments_end_to_end_with_tables_longer_than_their_contexts() -> None:
    segments = (
        PrefillSegment(2, 3, 10, torch.tensor([7, 4, 0, 0])),
        PrefillSegment(5, 1, 11, torch.tensor([2, 9, 5])),
    )
    paged = [part.tolist() for part in page_segments(segments, 5)]
    assert paged == [[0, 3, 4], [0, 2, 5], [7, 4, 2, 9, 5], [5, 1]]


@pytest.mark.parametrize("seed", range(3))
def test_prefills_equal_the_definition(seed: int) -> None:
    """Blocks are scattered, and every slot outside the contexts holds NaN."""
    problem = make_problem(SHAPE, [], PREFILLS, seed=seed, dtype=torch.float16)
    torch.testing.assert_close(solve(problem).double(), problem.answer, rtol=0, atol=4e-3)


def test_wrong_blocks_are_noticed() -> None:
    """Negative control: a chunk with a reversed block table gets another result."""
    problem = make_problem(SHAPE, [], PREFILLS, dtype=torch.float16)
    first, second, *others = problem.batch.prefills
    second = replace(second, block_table=second.block_table.flip(0))
    error = (solve(problem, (first, second, *others)).double() - problem.answer).abs()
    assert not error[second.first_row : second.first_row + second.num_tokens].max() < 0.1  # or NaN
    assert error[: second.first_row].max() < 4e-3


def test_rows_after_the_decodes_are_prefills_and_all_layers_use_one_plan() -> None:
    problem = make_problem(SHAPE, [3, 8], PREFILLS, dtype=torch.float16)
    prefill = open_fake()
    plan = CudaAttentionPlan(problem.batch, SHAPE, 1, prefill)
    for _ in range(3):
        kv, q = problem.kv.clone(), problem.q[2:]
        plan.write(kv, problem.new_kv)
        out = torch.empty(q.shape, dtype=q.dtype)
        prefill.run(q, kv, out)
        torch.testing.assert_close(out.flatten(1).double(), problem.answer[2:], rtol=0, atol=4e-3)
    wrapper = prefill._wrapper
    assert isinstance(wrapper, Wrapper)
    assert wrapper.num_plans == 1


def test_a_batch_of_decodes_is_not_planned() -> None:
    prefill = open_fake()
    CudaAttentionPlan(make_problem(SHAPE, [3, 8], [], dtype=torch.float16).batch, SHAPE, 1, prefill)
    assert prefill._wrapper.num_plans == 0


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (64, 8, 128), (8, 1, 256)])
def test_the_workspace_holds_every_split(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """FlashInfer reserves at most float32 tiles of all heads, with a log-sum for each row."""
    num_processors = 132
    tiles = 2 * num_processors // num_kv_heads
    needed = num_heads * tiles * 128 * head_dim * 4 + num_heads * tiles * 128 * 4
    assert needed <= workspace_bytes(AttentionShape(num_heads, num_kv_heads, head_dim, 16), num_processors)
