"""What a model is: sizes, rotary positions, biases. ``hf_config`` and ``gguf_config`` read it from files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from floodplain.cost.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base frequency, and how it is stretched for contexts longer than in pre-training.

    Attributes:
        theta: The base.
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` and ``yarn`` divide long wavelengths only.
        factor: See there.
        low_freq_factor: Of ``llama3``: wavelengths above this part of ``original_max_position`` are stretched, and
        high_freq_factor: those below this part are kept.
        original_max_position: The context in pre-training (``llama3`` and ``yarn``).
        beta_fast: Of ``yarn``: frequencies that turn more often than this in the original context are kept, and
        beta_slow: those that turn less often than this are stretched.
        truncate: Of ``yarn``: the bounds are whole indices.
        attention_factor: Multiplies cosines and sines.
        divisors: One number for each frequency, which it is divided by; empty for none.
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
        shape: All sizes.
        rope: Rotary positions (Llama family); None for learned ones (OPT).
        norm_eps: Added to the variance in a norm.
        o_bias: The projection after attention has a bias.
        mlp_bias: The feed-forward projections have biases.
        qk_norm: Each query and key head is RMS-normalised before the rotation (Qwen3).
        norm_first: Norms stand before attention and feed-forward, not after them (OPT-350m has them after).
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
