"""A model's configuration: sizes, rotary positions, biases. ``hf_config`` and ``gguf_config`` read it from files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from floodplain.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: the base, and the scaling for contexts longer than in pre-training.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` and ``yarn`` divide long wavelengths only.
        low_freq_factor: ``llama3`` scales wavelengths above ``original_max_position / low_freq_factor``, and
        high_freq_factor: keeps those below ``original_max_position / high_freq_factor``.
        original_max_position: The context in pre-training (``llama3`` and ``yarn``).
        beta_fast: ``yarn`` keeps frequencies with more rotations than this in the original context, and
        beta_slow: scales those with fewer rotations than this.
        truncate: Whether ``yarn`` rounds the bounds to whole indices.
        attention_factor: Multiplies cosines and sines.
        divisors: A divisor for each frequency; empty for none.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder that this package can run.

    Attributes:
        rope: Rotary positions (Llama family); None for learned ones (OPT).
        norm_eps: Added to the variance in a norm.
        o_bias: Whether the projection after attention has a bias.
        qk_norm: Whether each query and key head is RMS-normalised before the rotation (Qwen3).
        norm_first: Whether norms precede attention and feed-forward (OPT-350m has them after).
    """

    shape: ModelShape
    rope: RopeConfig | None
    norm_eps: float = 1e-5
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_first: bool = True

    @staticmethod
    def of_shape(shape: ModelShape) -> ModelConfig:
        """The plain configuration with this shape, for random weights."""
        is_opt = shape.family == "opt"
        return ModelConfig(shape=shape, rope=None if is_opt else RopeConfig(), o_bias=is_opt, mlp_bias=is_opt)
