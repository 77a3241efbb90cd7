"""A layer's parameters as views of one buffer, so that it can be moved, unmapped and refilled alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from floodplain.core.errors import InvariantError, UserError

ALIGN_BYTES = 64


class ParameterBuffer(Protocol):
    """Memory for parameters, which may be unmapped, and mapped again with unspecified content.

    ``tensor``: uint8, aligned to at least ``ALIGN_BYTES``; to be accessed only while it is mapped. ``is_filled``:
    whether all parameters are in it: set by ``fill_buffer``, cleared when the memory is unmapped.
    """

    tensor: torch.Tensor
    is_filled: bool

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind ``tensor``."""


class PlainBuffer:
    """A torch tensor as a ``ParameterBuffer`` that is never unmapped."""

    is_mapped = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_filled = False


Allocate = Callable[[int], ParameterBuffer]
"""``allocate(num_bytes)`` returns a mapped buffer of that length, with unspecified content."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parameter that are stored under one name in a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: its name in a layer, and the stored parts whose rows it joins, in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def weight_and_bias(
    name: str, rows: Mapping[str, int], width: int | None = None, *, has_bias: bool = True
) -> list[ParameterSpec]:
    """Specs of a weight and, if it has one, a bias, by the rows of each stored part; without ``width`` a vector."""
    weights = tuple(Part(f"{one}.weight", (size,) if width is None else (size, width)) for one, size in rows.items())
    biases = tuple(Part(f"{one}.bias", (size,)) for one, size in rows.items())
    return [ParameterSpec(f"{name}.weight", weights), *([ParameterSpec(f"{name}.bias", biases)] if has_bias else [])]


class WeightSource(Protocol):
    """A source of weights."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write the weights called ``name`` (as in a HF checkpoint) into ``target``. Raises UserError without them."""


def load_buffer(
    specs: Sequence[ParameterSpec], source: WeightSource, dtype: torch.dtype, allocate: Allocate
) -> tuple[ParameterBuffer, dict[str, torch.Tensor]]:
    """Allocate one buffer for all ``specs``, load it, and return it with the views by name."""
    buffer = allocate(buffer_bytes(specs, dtype))
    return buffer, fill_buffer(buffer, specs, source, dtype)


def fill_buffer(
    buffer: ParameterBuffer, specs: Sequence[ParameterSpec], source: WeightSource, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Load ``specs`` into a mapped buffer, and zeros between them; return their views by name."""
    if not buffer.is_mapped:
        raise InvariantError("parameters are loaded into a buffer without memory")
    buffer.is_filled = False
    views = view_buffer(buffer.tensor, specs, dtype)
    for spec in specs:
        rows = torch.split(views[spec.name], [part.shape[0] for part in spec.parts])
        for part, target in zip(spec.parts, rows, strict=True):
            source.fill(target, part.name)
            if not torch.stack(target.aminmax()).isfinite().all():
                raise UserError(f"the weights {part.name!r} have NaN or infinite numbers: get an undamaged copy")
    _clear_gaps(buffer.tensor, specs, dtype)
    buffer.is_filled = True
    return views


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


def _clear_gaps(buffer: torch.Tensor, specs: Sequence[ParameterSpec], dtype: torch.dtype) -> None:
    begin = 0
    for spec in specs:
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        buffer[begin + num_bytes : begin + _aligned(num_bytes)].zero_()
        begin += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
