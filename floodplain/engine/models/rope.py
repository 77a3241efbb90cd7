"""Rotary positions (arXiv:2104.09864), laid out as in HF checkpoints: number i of a head turns with number i + half."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from floodplain.engine.models.config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turn of a batch's positions.

    Attributes:
        cos: [T, 1, head_dim], in the dtype of the activations.
        signed_sin: The same of the sines, negated in the first half.
        halves: Cosines and sines, [T, head_dim / 2] each, in float32.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    halves: tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, [head_dim / 2] in float32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    # Llama 3.1: long wavelengths are stretched, short ones kept, and those between are mixed.
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position / wavelengths
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def rotation(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of ``positions`` [T], once per batch."""
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    halves = (cos.squeeze(1), sin.squeeze(1))
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype), halves)


def rotate_(heads: torch.Tensor, turn: Rotation) -> None:
    """Rotate ``heads`` [T, num_heads, head_dim] in place."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    torch.addcmul(heads * turn.cos, swapped, turn.signed_sin, out=heads)
