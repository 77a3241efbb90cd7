"""Chooses the backend of a device: the only place below the model that checks the kind of a device."""

from __future__ import annotations

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.backend import Backend


def choose_backend(device: torch.device) -> Backend:
    """The backend of a device; raises ``UserError`` if there is no such CUDA device."""
    if device.type == "cpu":
        from floodplain.memory.host.backend import HostBackend

        return HostBackend()
    if device.type == "cuda":
        from floodplain.memory.cuda.backend import open_cuda_backend

        return open_cuda_backend(device)
    raise InvariantError(f"no backend for device {device}")
