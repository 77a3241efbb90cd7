"""The parameters of a layer as views into one buffer, so that a layer can move, vanish and return alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ALIGN_BYTES = 64

Allocate = Callable[[int], torch.Tensor]
"""``allocate(num_bytes)`` gives an uninitialised uint8 tensor of that length, aligned to at least 64 bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parameter that are stored under one name in a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: its name in a layer, and the stored parts that are its rows, one below the other."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


class WeightSource(Protocol):
    """Where weights come from."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write the weights called ``name`` (as in a HF checkpoint) into ``target``.

        Raises:
            UserError: They are missing, unreadable, or have another shape.
        """
        ...


def load_buffer(
    specs: Sequence[ParameterSpec], source: WeightSource, dtype: torch.dtype, allocate: Allocate
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate one buffer for all ``specs``, load it, and return it with the views by name."""
    buffer = allocate(buffer_bytes(specs, dtype))
    views = view_buffer(buffer, specs, dtype)
    for spec in specs:
        rows = torch.split(views[spec.name], [part.shape[0] for part in spec.parts])
        for part, target in zip(spec.parts, rows, strict=True):
            source.fill(target, part.name)
    return buffer, views


def view_buffer(buffer: torch.Tensor, specs: Sequence[ParameterSpec], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters in ``buffer`` (uint8), each aligned to ``ALIGN_BYTES`` from its start."""
    views, begin = {}, 0
    for spec in specs:
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        views[spec.name] = buffer[begin : begin + num_bytes].view(dtype).view(spec.shape)
        begin += _aligned(num_bytes)
    return views


def buffer_bytes(specs: Sequence[ParameterSpec], dtype: torch.dtype) -> int:
    """Length of the buffer that holds ``specs``."""
    return sum(_aligned(math.prod(spec.shape) * dtype.itemsize) for spec in specs)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
