"""Rotary positions (arXiv:2104.09864) in the layout of HF checkpoints: number i of a head is paired with i + half."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from floodplain.model.network.config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a batch's positions.

    Attributes:
        cos: [T, 1, head_dim], in the dtype of the activations.
        signed_sin: The sines, likewise, negated in the first half.
        halves: Cosines and sines, [T, head_dim / 2] each, in float32.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    halves: tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, [head_dim / 2] in float32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.divisors:
        frequencies = frequencies / torch.tensor(config.divisors, dtype=torch.float32)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _mix(frequencies, config.factor, _kept_by_llama3(config, frequencies))
    if config.kind == "yarn":
        return _mix(frequencies, config.factor, _kept_by_yarn(config, head_dim))
    return frequencies


def _mix(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    """Frequencies over ``factor``, except the share ``kept`` (0 to 1) of each, which stays as it is."""
    return (1 - kept) * frequencies / factor + kept * frequencies


def _kept_by_llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are scaled, short ones kept, those between interpolated."""
    turns = config.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): a linear ramp over the index, between the indices of ``beta_fast`` and ``beta_slow``."""

    def index_of(turns: float) -> float:
        wavelength = config.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rotation:
    """The rotation of ``positions`` [T], once per batch; ``scale`` multiplies cosines and sines."""
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    halves = (cos.squeeze(1), sin.squeeze(1))
    return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype), halves)


def rotate_(heads: torch.Tensor, turn: Rotation) -> None:
    """Rotate ``heads`` [T, num_heads, head_dim] in place."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    torch.addcmul(heads * turn.cos, swapped, turn.signed_sin, out=heads)
