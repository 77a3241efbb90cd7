"""The operations between the matrix products of a Llama layer: by torch, or by the CPU kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from floodplain.model.native.ops import NativeOps
from floodplain.model.network.decoder import Step
from floodplain.model.network.rope import rotate_


class TorchOps:
    """The operations by torch, on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [T, width]`` over its root mean square, times ``weight``."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of the two halves of each row, [T, 2 * width] to [T, width]."""
        width = gate_up.shape[1] // 2
        return F.silu(gate_up[:, :width]) * gate_up[:, width:]

    def rotate_and_write(self, heads: torch.Tensor, num_heads: int, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys in place; store keys and values in the layer's ``kv``, and return what was stored.

        ``heads`` is [T, num_heads + 2 * num_kv_heads, head_dim], the result [T, 2, num_kv_heads, head_dim].
        """
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        if step.turn is not None:
            rotate_(heads[:, : num_heads + num_kv_heads], step.turn)
        new_kv = heads[:, num_heads:].view(-1, 2, num_kv_heads, heads.shape[2])
        step.attention.write(kv, new_kv)
        return new_kv


class KernelOps:
    """The operations by the CPU kernels: one call each, computed in float32."""

    def __init__(self, native: NativeOps) -> None:
        self.rms_norm = native.rms_norm
        self.silu_mul = native.silu_mul
        self._rotate_and_write = native.rotate_and_write

    def rotate_and_write(self, heads: torch.Tensor, num_heads: int, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """Rotate and store in one pass over the tokens."""
        turn = step.turn
        self._rotate_and_write(heads, num_heads, None if turn is None else turn.halves, step.slots, kv)
        return heads[:, num_heads:].view(-1, 2, (heads.shape[1] - num_heads) // 2, heads.shape[2])


LayerOps = TorchOps | KernelOps
