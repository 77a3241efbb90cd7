from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cuda import CudaAttention
from floodplain.model.attention.paged_prefill import DISABLE_VARIABLE
from tests.support.attention import make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = [
    AttentionShape(4, 2, 16, 4),
    AttentionShape(9, 3, 64, 16),
    AttentionShape(32, 8, 128, 16),
    AttentionShape(8, 1, 80, 32),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [([1], []), ([5, 300, 17, 64], []), ([9000], []), ([], [(0, 33)]), ([700, 3], [(0, 20), (50, 130), (16, 1)])],
)
def test_any_mix_equals_the_definition(
    shape: AttentionShape, decodes: list[int], prefills: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    problem = make_problem(shape, decodes, prefills, dtype=dtype, device="cuda")
    error = (problem.solve(CudaAttention(shape, may_use_flashinfer=False)).double() - problem.answer).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(20))
def test_random_mixes_equal_the_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    decodes = torch.randint(1, 2000, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
    shape = SHAPES[seed % len(SHAPES)]
    problem = make_problem(shape, decodes.tolist(), [(seed, 2 * seed + 1)], seed=seed, device="cuda")
    torch.testing.assert_close(
        problem.solve(CudaAttention(shape, may_use_flashinfer=False)).double(), problem.answer, rtol=0, atol=2e-5
    )


# -- prefills by FlashInfer --------------------------------------------------------------------------------------------

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)


@pytest.fixture
def flashinfer_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    caplog.set_level(logging.INFO, logger="floodplain")
    return caplog


@needs_flashinfer
@pytest.mark.timeout(900)  # the first test of each dtype and head size compiles a kernel
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(9, 3, 64, 16),
        AttentionShape(32, 8, 128, 16),
        AttentionShape(64, 8, 128, 5),
        AttentionShape(8, 1, 256, 32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [
        ([], [(0, 33)]),
        ([], [(9000, 5)]),  # few queries over a long context, which is split over multiprocessors
        ([700, 3], [(0, 20), (50, 130), (16, 1), (0, 1), (500, 1000)]),
    ],
)
def test_flashinfer_equals_the_definition(
    shape: AttentionShape,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    dtype: torch.dtype,
    flashinfer_log: pytest.LogCaptureFixture,
) -> None:
    problem = make_problem(shape, decodes, prefills, dtype=dtype, device="cuda")
    error = (problem.solve(CudaAttention(shape)).double() - problem.answer).abs().max()
    assert "prefills are computed by FlashInfer" in flashinfer_log.text
    assert error < TOLERANCE[dtype]


@needs_flashinfer
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_flashinfer_serves_one_plan_after_another() -> None:
    """Steps that sample nothing follow one another without waiting for the device."""
    shape = AttentionShape(32, 8, 128, 16)
    backend = CudaAttention(shape)
    problems = [
        make_problem(shape, [], [(300 * seed, 700)], seed=seed, dtype=torch.float16, device="cuda") for seed in range(8)
    ]
    solved = [problem.solve(backend) for problem in problems]
    for problem, out in zip(problems, solved, strict=True):
        assert (out.double() - problem.answer).abs().max() < TOLERANCE[torch.float16]
