"""What a model is, as its HF ``config.json`` says it; what the code here does not compute is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape

_LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_OPT = "OPTForCausalLM"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base frequency, and how it is stretched for contexts longer than in pre-training.

    ``factor`` divides the frequencies. The other numbers are for ``llama3`` scaling only, which stretches long
    wavelengths and leaves short ones alone (its bounds are parts of ``original_max_position``).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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


def parse_hf_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """Read the mapping in a HF ``config.json``; ``name`` is what the shape will be called.

    Raises:
        UserError: A field is missing or malformed, or asks for something that is not supported; the message names it.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if config.get("quantization_config"):
        raise UserError("config.json: quantization_config is not supported; use a .gguf file or unquantised weights")
    try:
        if architecture in _LLAMA_LIKE:
            return _parse_llama(config, name, str(architecture))
        if architecture == _OPT:
            return _parse_opt(config, name)
    except KeyError as error:
        raise UserError(f"config.json: the field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json: a field has a wrong value: {error}") from None
    supported = ", ".join((*_LLAMA_LIKE, _OPT))
    raise UserError(f"config.json: architectures is {architecture!r}; supported are {supported}")


def _require(config: Mapping[str, Any], field: str, *allowed: object) -> None:
    value = config.get(field, allowed[0])
    if value not in allowed:
        wanted = " or ".join(repr(one) for one in allowed)
        raise UserError(f"config.json: {field}={value!r} is not supported, only {wanted}")


def _parse_llama(config: Mapping[str, Any], name: str, architecture: str) -> ModelConfig:
    _require(config, "hidden_act", "silu")
    _require(config, "partial_rotary_factor", 1.0, None)
    _refuse_sliding_window(config, architecture)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    has_bias = bool(config.get("attention_bias", False))
    shape = ModelShape(
        name=name,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
    )
    return ModelConfig(
        shape=_checked(shape),
        rope=_parse_rope(config, shape),
        norm_eps=float(config["rms_norm_eps"]),
        o_bias=has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _refuse_sliding_window(config: Mapping[str, Any], architecture: str) -> None:
    # Mistral's own default, for files that leave the field out; Llama has none; Qwen's is off unless switched on.
    window = config.get("sliding_window", 4096 if architecture.startswith("Mistral") else None)
    is_used = not architecture.startswith("Qwen") or config.get("use_sliding_window", False)
    if is_used and window is not None and int(window) < int(config["max_position_embeddings"]):
        raise UserError(
            f"config.json: sliding_window={window} is not supported; "
            f"set it to null and max_position_embeddings to at most {window}"
        )
    for kind in config.get("layer_types") or ():
        _require({"layer_types": kind}, "layer_types", "full_attention")


def _parse_rope(config: Mapping[str, Any], shape: ModelShape) -> RopeConfig:
    # transformers 5 writes all of it into rope_parameters; earlier versions into rope_theta and rope_scaling.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(rope, "partial_rotary_factor", 1.0, None)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope.get("original_max_position_embeddings") or shape.max_position),
        )
    raise UserError(f"config.json: rope_type={kind!r} is not supported, only 'default', 'linear' or 'llama3'")


def _parse_opt(config: Mapping[str, Any], name: str) -> ModelConfig:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    _require(config, "activation_function", "relu")
    _require(config, "enable_bias", True)
    _require(config, "layer_norm_elementwise_affine", True)
    _require(config, "_remove_final_layer_norm", False)
    _require(config, "word_embed_proj_dim", hidden, None)
    shape = ModelShape(
        name=name,
        family="opt",
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=int(config["ffn_dim"]),
        vocab_size=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=True,
    )
    norm_first = bool(config.get("do_layer_norm_before", True))
    return ModelConfig(shape=_checked(shape), rope=None, o_bias=True, mlp_bias=True, norm_first=norm_first)


def _checked(shape: ModelShape) -> ModelShape:
    sizes = (shape.num_layers, shape.hidden_size, shape.num_kv_heads, shape.head_dim, shape.ffn_size, shape.vocab_size)
    if min(*sizes, shape.num_heads, shape.max_position) < 1:
        raise UserError("config.json: every size must be positive")
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({shape.num_heads}) must be a multiple of "
            f"num_key_value_heads ({shape.num_kv_heads})"
        )
    if shape.family == "llama" and shape.head_dim % 2:
        raise UserError(f"config.json: head_dim ({shape.head_dim}) must be even for rotary positions")
    return shape
