"""The CPU kernels against float64, and what happens where they cannot be compiled."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.memory.native import build
from floodplain.model.attention.backend import AttentionShape
from floodplain.model.attention.cpu import CpuAttention
from floodplain.model.native.ops import NativeOps, native_ops
from floodplain.model.network.config import RopeConfig
from floodplain.model.network.decoder import Step
from floodplain.model.network.ops import KernelOps, TorchOps
from floodplain.model.network.rope import inverse_frequencies, rotation
from tests.support.attention import make_problem
from tests.support.examples import examples

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}
DTYPES = st.sampled_from(list(TOLERANCES))


@pytest.fixture(scope="module", autouse=True)
def three_threads() -> Iterator[None]:
    """Use three threads whatever ``OMP_NUM_THREADS`` is: one thread shows no race."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def kernels(dtype: torch.dtype) -> NativeOps:
    ops = native_ops(CPU, dtype)
    if ops is None:
        pytest.skip("no C++ compiler here: the kernels cannot be compiled")
    return ops


@given(
    sizes=st.sampled_from([(9, 3, 64), (4, 2, 16), (8, 1, 16), (3, 3, 128), (5, 1, 8), (7, 1, 64)]),
    block_tokens=st.integers(1, 17),
    decodes=st.lists(st.integers(1, 70), min_size=1, max_size=7),
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=2),
    dtype=DTYPES,
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(40))
def test_decode_equals_the_definition(
    sizes: tuple[int, int, int],
    block_tokens: int,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Blocks are scattered, slots outside all contexts are NaN, and prefills run beside decodes."""
    shape = AttentionShape(*sizes, block_tokens)
    problem = make_problem(shape, decodes, prefills, seed=seed, dtype=dtype)
    solved = problem.solve(CpuAttention(shape, kernels(dtype))).double()
    torch.testing.assert_close(solved, problem.answer, rtol=0, atol=TOLERANCES[dtype])


def test_loading_the_kernels_leaves_the_processor_as_it_was() -> None:
    """A library linked with -ffast-math would flush every subnormal number of this process to zero."""
    kernels(torch.float32)
    smallest = float.fromhex("0x1p-1074")
    assert smallest + 0.0 == smallest > 0.0
    assert float.fromhex("0x1p-1073") / 2 == smallest


def test_decode_kernel_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the decode test: a kernel that returns zeros is noticed."""
    ops = kernels(torch.float32)
    monkeypatch.setattr(NativeOps, "decode", lambda self, q, *rest: q.flatten(1) * 0)
    shape = AttentionShape(9, 3, 64, 16)
    problem = make_problem(shape, [20], [])
    assert not torch.allclose(problem.solve(CpuAttention(shape, ops)).double(), problem.answer, atol=1e-2)


def test_sizes_without_a_kernel_are_denied() -> None:
    ops = kernels(torch.float32)
    assert ops.can_decode(9, 3, 64)
    assert not ops.can_decode(9, 3, 60)
    assert not ops.can_decode(18, 3, 64)


@given(rows=st.integers(1, 70), width=st.integers(1, 600), dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=examples(25))
def test_norm_and_gate_equal_float64(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * width, generator=generator).to(dtype)
    weight = torch.rand(2 * width, generator=generator).to(dtype)
    ops, wide = kernels(dtype), x.double()
    normed = F.rms_norm(wide, (2 * width,), weight.double(), 1e-5)
    gated = F.silu(wide[:, :width]) * wide[:, width:]
    relative = TOLERANCES[dtype] / 3
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), normed, rtol=relative, atol=relative)
    torch.testing.assert_close(ops.silu_mul(x).double(), gated, rtol=relative, atol=relative)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("turns", [True, False])
def test_rotation_and_write_equal_torch(dtype: torch.dtype, turns: bool) -> None:
    num_tokens, num_heads, num_kv_heads, dim, block_tokens = 11, 6, 2, 16, 4
    shape = AttentionShape(num_heads, num_kv_heads, dim, block_tokens)
    problem = make_problem(shape, [], [(3, num_tokens)], dtype=dtype)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(dtype)
    turn = rotation(problem.batch.positions, inverse_frequencies(RopeConfig(), dim), dtype) if turns else None
    step = Step(CpuAttention(shape).plan(problem.batch, dtype), turn, problem.batch.slot_mapping)
    results = []
    for ops in (TorchOps(), KernelOps(kernels(dtype))):
        mine, kv = heads.clone(), torch.zeros(12, 2, block_tokens, num_kv_heads, dim, dtype=dtype)
        stored = ops.rotate_and_write(mine, num_heads, step, kv)
        results.append((mine.float(), stored.float(), kv.float()))
    for by_torch, by_kernel in zip(*results, strict=True):
        torch.testing.assert_close(by_kernel, by_torch, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("compilers", "message"), [(("no-such-compiler",), "no C\\+\\+ compiler"), (("false",), "cannot be compiled")]
)
def test_without_a_compiler_one_line_is_logged(
    compilers: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(build, "COMPILERS", compilers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native_ops(CPU, torch.float32) is None
            assert native_ops(CPU, torch.float32) is None  # logged once
        assert len(caplog.records) == 1
        assert re.search(message, caplog.text)
    finally:
        build.load_library.cache_clear()
