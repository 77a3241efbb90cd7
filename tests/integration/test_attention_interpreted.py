"""The CUDA backend without CUDA: its kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cuda import CudaAttentionPlan
from tests.support.attention import make_problem

class Interpreted:
    def __init__(self, shape, num_processors):
        self.shape, self.num_processors = shape, num_processors
    def plan(self, batch, dtype):
        return CudaAttentionPlan(batch, self.shape, self.num_processors)

for shape, num_processors, decodes, prefills in (
    (AttentionShape(4, 2, 8, 4), 1, [5, 1, 17], [(3, 4), (0, 5)]),
    (AttentionShape(9, 3, 64, 16), 100, [300, 900, 5, 257], []),
    (AttentionShape(8, 1, 80, 16), 100, [1500, 3], [(20, 7)]),
):
    problem = make_problem(shape, decodes, prefills)
    answer = problem.solve(Interpreted(shape, num_processors))
    torch.testing.assert_close(answer.double(), problem.answer, rtol=0, atol=2e-5)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_equal_the_definition() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
