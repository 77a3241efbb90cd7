"""A tensor whose bytes move between this process's host memory and another device (AQUA, section 6: AQUA tensor).

The bytes are in one place at a time. A move copies first, then switches, and frees last, so that a failed one leaves
everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.tiers import Tier
from floodplain.memory.peer.memory import Extent


class TensorLost(Exception):
    """The only bytes of an elastic tensor were on a device that is gone. Close the tensor and compute it anew."""


class ElasticTensor:
    """Made by ``ElasticPool.to_elastic``; used on its pool's thread.

    Args:
        tensor: A dense one with at least one element, on any device; its values are copied.
        on_close: Called after ``close`` has freed the bytes.

    Attributes:
        num_bytes: Of its values.

    Raises:
        UserError: It is not dense, or is empty.
    """

    def __init__(self, tensor: torch.Tensor, on_close: Callable[[ElasticTensor], None]) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            raise UserError("only dense tensors with at least one element can be elastic: convert it, or leave it out")
        self.num_bytes = tensor.numel() * tensor.element_size()
        self._dtype, self._shape = tensor.dtype, tuple(tensor.shape)
        self._extent: Extent | None = None
        self._on_close = on_close
        self._is_open, self._is_away = True, False
        self._bytes: torch.Tensor | None = _copy_to_host(tensor.detach())

    @property
    def location(self) -> Tier:
        """Return where the bytes are: PEER or HOST, so that a program can act on it (AQUA, section 7, end).

        Raises:
            UserError: It is closed.
            TensorLost: Its bytes were on a device that is gone.
        """
        self.torch()
        return Tier.PEER if self._is_away else Tier.HOST

    def torch(self) -> torch.Tensor:
        """Return the tensor at its bytes' present place, for reading and writing; without a gradient.

        Valid until the pool's next ``respond`` or ``close``: then it, and every view of it, must not be touched.

        Raises:
            UserError: The elastic tensor is closed.
            TensorLost: Its bytes were on a device that is gone.
        """
        if not self._is_open:
            raise UserError("this elastic tensor is closed: use it before its pool ends")
        if self._bytes is None:
            raise TensorLost("the device with the only bytes of this elastic tensor is gone: close it, compute it anew")
        return self._bytes

    def prepare(self, extent: Extent) -> None:
        """For its pool: own the extent to which the bytes, now on the host, are to move."""
        self._extent = extent

    def move_to_peer(self) -> None:
        """For its pool: move the bytes to the extent that it owns.

        Raises:
            torch.AcceleratorError: The device is gone; nothing changed.
            InvariantError: It owns none, or the extent is too small.
        """
        if self._extent is None:
            raise InvariantError("an elastic tensor moves to a neighbour, and has no extent there")
        there = self._extent.tensor(self._dtype, self._shape)
        there.copy_(self.torch())
        self._bytes, self._is_away = there, True

    def move_to_host(self) -> bool:
        """For its pool: bring the bytes back, if they are away, and free the extent; False if they were lost with it.

        Raises:
            RuntimeError: The host has no memory for them; nothing changed.
        """
        if self._is_away:
            try:
                self._bytes = _copy_to_host(self.torch())
            except torch.AcceleratorError:
                self._bytes = None
            self._is_away = False
        self._free_extent()
        return self._bytes is not None

    def close(self) -> None:
        """Free the bytes, wherever they are, and the lease. A second call does nothing."""
        if self._is_open:
            self._is_open, self._bytes = False, None
            self._free_extent()
            self._on_close(self)

    def _free_extent(self) -> None:
        if self._extent is not None:
            self._extent.close()
            self._extent = None


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
