"""The product with a weight matrix: in its stored layout, or repacked for the CPU's matrix kernels."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

FEW_ROWS = 8
"""Most rows for which torch's bfloat16 product takes no longer than a float32 product with converted weights."""
PART_WEIGHTS = 2**20
"""Weights that are converted at a time: few enough to stay in the CPU's cache until they are multiplied."""


class Linear:
    """Weight [out, in] and bias [out] or None, used in place."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._fast_dtype = fast_dtype(weight.dtype, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        if x.dtype == self._fast_dtype or x.shape[0] <= FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        return self._converted_product(x.to(self._fast_dtype)).to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` plus the product."""
        return residual + self(x)

    def _converted_product(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.weight.split(max(1, PART_WEIGHTS // x.shape[1]))  # type: ignore[no-untyped-call]
        product = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], 1)
        return product if self.bias is None else product.add_(self.bias)


class PackedLinear:
    """A copy of weight and bias in ``fast_dtype`` and oneDNN's blocked layout (``benchmarks/engine/products.py``)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._dtype = fast_dtype(weight.dtype, weight.device)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._dtype))
        self._bias = None if bias is None else bias.to(self._dtype, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        out = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._weight, self._bias, "none", [], "")
        return out.to(x.dtype)  # type: ignore[no-any-return]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual`` plus the product, added before rounding."""
        x, added = x.to(self._dtype), residual.to(self._dtype)
        out = torch.ops.mkldnn._linear_pointwise.binary(x, added, self._weight, self._bias, "add")
        return out.to(residual.dtype)  # type: ignore[no-any-return]


Projection = Linear | PackedLinear
"""``x [T, in] -> x W^T + b [T, out]``."""
MakeProjection = type[Linear] | type[PackedLinear]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch has packed products for ``dtype`` on ``device``."""
    return device.type == "cpu" and bool(torch._C._has_mkldnn) and dtype in (torch.float32, torch.bfloat16)


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The format in which weights of ``dtype`` are multiplied: float32 for bfloat16 on a CPU without its products."""
    if device.type != "cpu" or dtype != torch.bfloat16 or _has_bf16_products():
        return dtype
    return torch.float32


@cache
def _has_bf16_products() -> bool:
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
