"""Rotary positions from ``config.json``: ``rope_scaling``, ``rope_parameters``, and keys at the top level.

Precedence is that of transformers 5: ``rope_scaling`` replaces ``rope_parameters``, ``rope_type`` precedes ``type``,
and numbers inside the mapping precede those at the top level, except ``original_max_position_embeddings``.
"""

from __future__ import annotations

import math

from floodplain.model.network.config import RopeConfig
from floodplain.model.network.fields import MAX_WHOLE, Fields

_HARMLESS = ("finetuned",)
_SCALED_TYPES = ("llama3", "yarn", "longrope")
_TYPES = ("default", "linear", "dynamic", *_SCALED_TYPES)


def parse_rope(config: Fields, head_dim: int, max_position: int) -> tuple[RopeConfig, int]:
    """Read all keys of rotary positions; returns these and the longest context, in tokens.

    ``linear`` and ``yarn`` extend ``max_position``; ``dynamic`` and ``longrope``, whose frequencies depend on the
    text's length, are limited to lengths where these do not change.
    """
    config.require("partial_rotary_factor", 1.0, None)
    scaling, parameters = config.child("rope_scaling"), config.child("rope_parameters")
    rope = scaling or parameters or Fields({}, config.where)
    kind, original = _read_kind(rope), config.whole_or_none("original_max_position_embeddings")
    rope.require("partial_rotary_factor", 1.0, None)
    theta = rope.number("rope_theta", config.number_or_none("rope_theta") or 10_000.0)
    if kind in _SCALED_TYPES:
        inner = rope.whole("original_max_position_embeddings", max_position, least=2)
        found = _parse_scaled(kind, rope, theta, head_dim, (original or inner, max_position))
    elif kind == "linear":
        linear = RopeConfig(theta, "linear", rope.number("factor"))
        found = linear, stretched_context(max_position, linear.factor)
    else:
        if kind == "dynamic":
            rope.number("factor")  # of contexts beyond max_position
        found = RopeConfig(theta), max_position
    rope.refuse_unread(_HARMLESS, because=f"rope_type={kind!r} has no such key")
    if scaling is not None and parameters is not None:
        _refuse_what_is_replaced(parameters, scaling, theta)
    return found


def _read_kind(rope: Fields) -> str:
    kind = rope.text("rope_type", rope.value("type", "default"))
    rope.require("rope_type" if "rope_type" in rope else "type", *_TYPES)
    if "type" in rope:
        rope.require("type", kind, None)
    return kind


def stretched_context(context: int, factor: float) -> int:
    """``context`` times ``factor``, in whole tokens; at least ``context``, at most ``MAX_WHOLE``."""
    return int(min(context * max(factor, 1.0), MAX_WHOLE))


def _parse_scaled(
    kind: str, rope: Fields, theta: float, head_dim: int, contexts: tuple[int, int]
) -> tuple[RopeConfig, int]:
    original, max_position = contexts
    if kind == "llama3":
        return _parse_llama3(rope, theta, original), max_position
    if kind == "yarn":
        yarn = _parse_yarn(rope, theta, original, max_position)
        return yarn, max(stretched_context(original, yarn.factor), max_position)
    return _parse_longrope(rope, theta, head_dim, contexts), min(original, max_position)


def _parse_llama3(rope: Fields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", f"must be above low_freq_factor={low:g}")
    return RopeConfig(theta, "llama3", rope.number("factor"), low, high, original)


def _parse_yarn(rope: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    factor = max_position / original if rope.value("factor") is None else rope.number("factor")
    scale, of_all = rope.number_or_none("mscale"), rope.number_or_none("mscale_all_dim")
    inferred = yarn_attention(factor, scale) / yarn_attention(factor, of_all) if scale and of_all else None
    if theta <= 1.0:
        raise rope.refusal("rope_theta", "must be above 1 for yarn")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=rope.number_or_none("beta_fast") or 32.0,
        beta_slow=rope.number_or_none("beta_slow") or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number_or_none("attention_factor") or inferred or yarn_attention(factor),
    )


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines, for a context that is ``factor`` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _parse_longrope(rope: Fields, theta: float, head_dim: int, contexts: tuple[int, int]) -> RopeConfig:
    original, max_position = contexts
    factor = rope.number_or_none("factor") or max_position / original
    attention = rope.number_or_none("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rope.numbers("long_factor", head_dim // 2)  # of longer contexts
    divisors = rope.numbers("short_factor", head_dim // 2)
    return RopeConfig(theta, attention_factor=attention, divisors=divisors)


def _refuse_what_is_replaced(parameters: Fields, scaling: Fields, theta: float) -> None:
    """Refuse ``rope_parameters`` that differ from the ``rope_scaling`` which replaces them."""
    usual = {"rope_theta": theta, "rope_type": _read_kind(scaling), "type": _read_kind(scaling)}
    for key in parameters:
        value = parameters.value(key)
        wanted = scaling.value(key, usual.get(key))
        if value not in (wanted, "default"):
            raise parameters.refusal(
                key, f"is replaced by rope_scaling, where it is {wanted!r}: move it there, or remove one of the two"
            )
