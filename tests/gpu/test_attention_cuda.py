from __future__ import annotations

import pytest
import torch

from floodplain.engine.attention.backend import AttentionShape
from floodplain.engine.attention.cuda import CudaAttention
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
    error = (problem.solve(CudaAttention(shape)).double() - problem.answer).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(20))
def test_random_mixes_equal_the_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    decodes = torch.randint(1, 2000, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
    shape = SHAPES[seed % len(SHAPES)]
    problem = make_problem(shape, decodes.tolist(), [(seed, 2 * seed + 1)], seed=seed, device="cuda")
    torch.testing.assert_close(problem.solve(CudaAttention(shape)).double(), problem.answer, rtol=0, atol=2e-5)
