"""Reads a model's configuration from a HF ``config.json``; what the code does not compute is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.fields import Fields
from floodplain.model.network.hf_rope import parse_rope

_ABOUT_THE_FILE = (
    "_name_or_path _commit_hash _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
    "_experts_implementation auto_map base_model_name dtype is_llama_config license name_or_path "
    "tokenizer_class torch_dtype transformers.js_config transformers_version "
    "unsloth_fixed unsloth_version use_flash_attn"
)
_OF_TRAINING = (
    "attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop finetuning_task gradient_checkpointing "
    "hidden_dropout id2label init_std initializer_range label2id label_smoothing layerdrop neftune_noise_alpha "
    "num_labels problem_type resid_pdrop task_specific_params tf_legacy_loss use_bfloat16"
)
_OF_THE_CALLER = (
    "chunk_size_feed_forward keys_to_ignore_at_inference output_attentions output_hidden_states output_scores "
    "pretraining_tp remove_invalid_values return_dict return_dict_in_generate tie_last_hidden_states torchscript "
    "use_cache use_return_dict"
)
_OF_SAMPLING = (
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty length_penalty max_length max_new_tokens max_sequence_length min_length "
    "model_max_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences prefix repetition_penalty "
    "suppress_tokens temperature top_k top_p typical_p"
)

_HARMLESS_KEYS = frozenset(" ".join((_ABOUT_THE_FILE, _OF_TRAINING, _OF_THE_CALLER, _OF_SAMPLING)).split())
"""Keys that change no logit at any value. Sampling is set by requests."""

TOKEN_IDS = (
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id",
)  # fmt: skip
"""Keys with token ids. They change no logit; ``eos_token_id`` ends a text."""

_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "embedding_multiplier": (1.0,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Keys that change nothing at these values; at all others the model is refused."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How transformers reads the keys of one ``model_type``; defaults are the values of absent keys.

    Attributes:
        architecture: Its class in transformers.
        attention_bias: Projections to which ``attention_bias`` applies; ``fixed``: query, key and value have biases.
        kv_heads: ``num_key_value_heads``; None: as many as query heads.
        head_dim: None: by the hidden size.
        window: ``sliding_window``; ``switches_window``: ``use_sliding_window`` turns it on.
    """

    architecture: str
    attention_bias: Literal["none", "fixed", "all"] = "none"
    mlp_bias: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    switches_window: bool = False
    qk_norm: bool = False


_LLAMA_LIKE = {
    "llama": _Family("LlamaForCausalLM", attention_bias="all", mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", kv_heads=8, window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", attention_bias="fixed", kv_heads=32, window=4096, switches_window=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        attention_bias="all",
        kv_heads=32,
        head_dim=128,
        window=4096,
        switches_window=True,
        qk_norm=True,
    ),
}
ARCHITECTURES = {**{family.architecture: name for name, family in _LLAMA_LIKE.items()}, "OPTForCausalLM": "opt"}
"""The ``model_type`` of each supported class of transformers."""


def parse_hf_config(config: Mapping[str, Any], name: str, where: str = "config.json") -> ModelConfig:
    """Read the mapping in a HF ``config.json`` (``where``, for messages) into a configuration with this ``name``.

    Raises UserError if a key is missing, malformed or unknown here, or a value is not supported.
    """
    fields = Fields(config, where)
    if fields.value("quantization_config", None) is not None:
        raise fields.refusal("quantization_config", "is not supported: use a .gguf file or unquantised weights")
    model_type = _model_type(fields)
    parsed = _parse_opt(fields, name) if model_type == "opt" else _parse_llama(fields, name, _LLAMA_LIKE[model_type])
    for key in TOKEN_IDS:
        fields.token_ids(key)
    fields.refuse_unread(_HARMLESS_KEYS, _NEUTRAL_VALUES)
    return parsed


def _model_type(fields: Fields) -> str:
    """The type by ``architectures``, ``model_type`` or both, which must agree."""
    listed = fields.value("architectures", None)
    model_type = fields.value("model_type", None)
    if listed is None and model_type in ARCHITECTURES.values():
        return str(model_type)
    architecture = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    found = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if found is None:
        raise UserError(
            f"{fields.where}: architectures is {architecture!r} and model_type {model_type!r}; "
            f"supported are {', '.join(ARCHITECTURES)}, one alone"
        )
    fields.require("model_type", found, None)
    return found


def _parse_llama(fields: Fields, name: str, family: _Family) -> ModelConfig:
    fields.require("hidden_act", "silu", "swish")
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_dim = fields.whole_or_none("head_dim", family.head_dim) or _split_evenly(fields, hidden, heads)
    kv_heads = fields.whole_or_none("num_key_value_heads", family.kv_heads) or heads
    if heads % kv_heads:
        raise fields.refusal("num_attention_heads", f"must be a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise UserError(f"{fields.where}: head_dim={head_dim} must be even for rotary positions")
    rope, context = parse_rope(fields, head_dim, fields.whole("max_position_embeddings"))
    has_bias = _flag_if(family.attention_bias == "all", fields, "attention_bias")
    shape = ModelShape(
        name=name,
        num_layers=fields.whole("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.whole("intermediate_size"),
        vocab_size=fields.whole("vocab_size"),
        max_position=context,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=has_bias or family.attention_bias == "fixed",
    )
    _refuse_sliding_window(fields, family, shape)
    return ModelConfig(
        shape=shape,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps"),
        o_bias=has_bias,
        mlp_bias=_flag_if(family.mlp_bias, fields, "mlp_bias"),
        qk_norm=family.qk_norm,
    )


def _split_evenly(fields: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.refusal("num_attention_heads", f"must divide hidden_size={hidden}")
    return hidden // heads


def _flag_if(is_read: bool, fields: Fields, key: str) -> bool:
    """The flag; False for a family for which transformers ignores the key."""
    if is_read:
        return fields.flag(key, False)
    fields.value(key, None)
    return False


def _refuse_sliding_window(fields: Fields, family: _Family, shape: ModelShape) -> None:
    is_on, first = True, 0
    if family.switches_window:
        is_on, first = fields.flag("use_sliding_window", False), fields.whole("max_window_layers", 28, least=0)
    window = fields.whole_or_none("sliding_window", family.window)
    types = fields.value("layer_types", None)
    if types is None:
        slides = first < shape.num_layers
    else:
        slides = _has_sliding_layers(fields, types, shape.num_layers)
        if slides and not (family.switches_window and is_on and window is not None):
            raise fields.refusal("layer_types", "is not supported, only 'full_attention' for every layer")
        slides = slides or not family.switches_window  # Mistral's window is for every layer
    if is_on and slides and window is not None and window < shape.max_position:
        raise UserError(
            f"{fields.where}: sliding_window={window} is not supported: texts may have {shape.max_position} tokens; "
            f"set it to null and max_position_embeddings to at most {window}"
        )


def _has_sliding_layers(fields: Fields, types: object, num_layers: int) -> bool:
    full, sliding = ("full_attention", "attention"), ("sliding_attention",)
    if not isinstance(types, list) or len(types) != num_layers or not all(one in full + sliding for one in types):
        raise fields.refusal("layer_types", f"must have 'full_attention' for each of num_hidden_layers={num_layers}")
    return any(one in sliding for one in types)


def _parse_opt(fields: Fields, name: str) -> ModelConfig:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.require("activation_function", "relu")
    fields.require("enable_bias", True)
    fields.require("layer_norm_elementwise_affine", True)
    fields.require("_remove_final_layer_norm", False)
    if fields.whole_or_none("word_embed_proj_dim") not in (None, hidden):
        raise fields.refusal("word_embed_proj_dim", f"is not supported, only hidden_size={hidden}")
    head_dim = _split_evenly(fields, hidden, heads)
    shape = ModelShape(
        name=name,
        family="opt",
        num_layers=fields.whole("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        ffn_size=fields.whole("ffn_dim"),
        vocab_size=fields.whole("vocab_size"),
        max_position=fields.whole("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
    )
    norm_first = fields.flag("do_layer_norm_before", True)
    return ModelConfig(shape=shape, rope=None, o_bias=True, mlp_bias=True, norm_first=norm_first)
