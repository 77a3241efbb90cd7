"""Chooses the attention backend of a device."""

from __future__ import annotations

import torch

from floodplain.core.errors import InvariantError
from floodplain.model.attention.backend import AttentionBackend, AttentionShape
from floodplain.model.native.ops import NativeOps


def attention_backend(device: torch.device, shape: AttentionShape, native: NativeOps | None) -> AttentionBackend:
    """The backend for a device; ``native`` are the CPU kernels, if there are any."""
    if device.type == "cpu":
        from floodplain.model.attention.cpu import CpuAttention

        return CpuAttention(shape, native)
    if device.type == "cuda":
        from floodplain.model.attention.cuda import CudaAttention

        return CudaAttention(shape)
    raise InvariantError(f"no attention for device {device}")
