"""The kernels as functions of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.native.build import load_library

SOURCE = Path(__file__).with_name("kernels.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeOps:
    """The kernels for float32 or bfloat16. Tensors must be contiguous, on the CPU, and of that dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        def kernel(name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
            function = library[f"{name}_{_NAMES[dtype]}"]
            function.argtypes, function.restype = types, result
            return function

        self._rms_norm = kernel("rms_norm", *[_POINTER] * 3, _INT, _INT, _FLOAT)
        self._silu_mul = kernel("silu_mul", _POINTER, _POINTER, _INT, _INT)
        self._rotate_and_write = kernel("rotate_and_write", *[_POINTER] * 5, *[_INT] * 5)
        self._decode = kernel("decode", *[_POINTER] * 5, *[_INT] * 7, _FLOAT, result=ctypes.c_int)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [T, width]`` over its root mean square, times ``weight``."""
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of the two halves of each row, [T, 2 * width] to [T, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def rotate_and_write(
        self,
        heads: torch.Tensor,
        num_heads: int,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
        slots: torch.Tensor,
        kv: torch.Tensor,
    ) -> None:
        """Rotate queries and keys in place and store keys and values.

        Args:
            heads: [T, num_heads + 2 * num_kv_heads, head_dim].
            turn: Cosines and sines, each [T, head_dim / 2] in float32; None rotates nothing.
            slots: [T], block * block_tokens + offset.
            kv: [num_blocks, 2, block_tokens, num_kv_heads, head_dim].
        """
        cos, sin = (turn[0].data_ptr(), turn[1].data_ptr()) if turn is not None else (None, None)
        self._rotate_and_write(
            heads.data_ptr(), cos, sin, slots.data_ptr(), kv.data_ptr(),
            heads.shape[0], num_heads, kv.shape[3], kv.shape[4], kv.shape[2],
        )  # fmt: skip

    def can_decode(self, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether there is a kernel for these sizes."""
        status: int = self._decode(None, None, None, None, None, 0, 0, 0, num_heads, num_kv_heads, head_dim, 1, 1.0)
        return not status

    def decode(
        self, q: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one query row per sequence, [B, heads * head_dim]; InvariantError unless ``can_decode``.

        Args:
            q: [B, heads, head_dim]; only its rows may be strided.
            kv: [num_blocks, 2, block_tokens, num_kv_heads, head_dim].
            tables: [B, max_blocks], ``lengths`` [B]: int64.
        """
        rows, num_heads, dim = q.shape
        out = q.new_empty(rows, num_heads * dim)
        status: int = self._decode(
            q.data_ptr(), kv.data_ptr(), tables.data_ptr(), lengths.data_ptr(), out.data_ptr(),
            rows, q.stride(0), tables.stride(0), num_heads, kv.shape[3], dim, kv.shape[2], scale,
        )  # fmt: skip
        if status:
            raise InvariantError(f"no decode kernel for {num_heads} heads, {kv.shape[3]} KV heads of {dim}")
        return out


def native_ops(device: torch.device, dtype: torch.dtype) -> NativeOps | None:
    """The kernels for a device and dtype; None if there are none."""
    if device.type != "cpu" or dtype not in _NAMES:
        return None
    library = load_library(SOURCE, "torch")
    return None if library is None else NativeOps(library, dtype)
