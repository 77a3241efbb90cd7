"""Products with a weight matrix, in each way and format, against float64."""

from __future__ import annotations

import pytest
import torch

from floodplain.model.network import linear
from floodplain.model.network.linear import FEW_ROWS, Linear, PackedLinear, can_pack, fast_dtype

CPU = torch.device("cpu")
NUM_IN, NUM_OUT = 48, 80
ROWS = [1, FEW_ROWS, FEW_ROWS + 1, 3 * FEW_ROWS]
NEEDS_ONEDNN = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this torch has no packed products")
WAYS = [Linear, pytest.param(PackedLinear, marks=NEEDS_ONEDNN)]


@pytest.fixture(
    params=sorted({False, linear._has_bf16_products()}), ids=["no bf16 products", "bf16 products"].__getitem__
)
def has_bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU has bfloat16 products; True only if this CPU has."""
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: request.param)
    return bool(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """A rounding to bfloat16 moves a value by at most 2^-8 of it; sums in float32 add far less than 1e-4."""
    assert actual.dtype == torch.bfloat16 and actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= 2.0**-8 * rounded + 1e-4).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("part_weights", [2**20, 7 * NUM_IN, 1], ids=["whole", "by seven rows", "row by row"])
def test_a_product_is_the_exact_one_rounded_once(
    has_bf16_products: bool,
    way: linear.MakeProjection,
    num_rows: int,
    has_bias: bool,
    part_weights: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "PART_WEIGHTS", part_weights)
    x, weight, bias = random(num_rows, NUM_IN, seed=1), random(NUM_OUT, NUM_IN), random(NUM_OUT, seed=2)
    product = way(weight, bias if has_bias else None)(x)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert_rounded(product, exact, exact.abs())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_is_added_to_a_residual_that_stays(
    has_bf16_products: bool, way: linear.MakeProjection, num_rows: int
) -> None:
    x, weight, residual = random(num_rows, NUM_IN, seed=1), random(NUM_OUT, NUM_IN), random(num_rows, NUM_OUT, seed=3)
    before = residual.clone()
    total = way(weight, None).add_to(residual, x)
    product = x.double() @ weight.double().T
    assert residual.equal(before)
    assert_rounded(total, product + before.double(), 2.01 * product.abs() + before.abs())


def test_weights_are_multiplied_in_float32_only_where_bfloat16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {}
    for has in (True, False):
        monkeypatch.setattr(linear, "_has_bf16_products", lambda has=has: has)
        for device in (CPU, torch.device("cuda")):
            for dtype in (torch.float32, torch.bfloat16):
                answers[has, device.type, dtype] = fast_dtype(dtype, device)
    changed = {case for case, answer in answers.items() if answer != case[2]}
    assert changed == {(False, "cpu", torch.bfloat16)}
    assert answers[False, "cpu", torch.bfloat16] == torch.float32
