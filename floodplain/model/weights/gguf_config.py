"""Reads a model's configuration from a ``.gguf`` file's keys; what the code does not compute is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape
from floodplain.model.network.config import ModelConfig, RopeConfig
from floodplain.model.network.fields import Fields
from floodplain.model.network.hf_rope import stretched_context, yarn_attention
from floodplain.model.weights.checkpoint import StoredTensor
from floodplain.model.weights.gguf_tokenizer import check_tokenizer_keys

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_HEADS, _KV_HEADS = "llama.attention.head_count", "llama.attention.head_count_kv"
_HEAD_DIM = "llama.attention.key_length"
_HARMLESS_KEYS = (
    r"(?!general\.|llama\.|tokenizer\.|split\.|adapter\.).*"  # of no namespace that llama.cpp reads
    r"|general\.(?!type$|architecture$).*"
    r"|llama\.(tensor_data_layout|rope\.scaling\.finetuned)"
    r"|tokenizer\.(chat_template(\..*)?|chat_templates|huggingface\.json)"
    r"|tokenizer\.ggml\.(tokens|token_type|token_type_count|scores|merges|[a-z_]+_token_id|add_bos_token|add_eos_token)"
)
"""They change no logit, and no token unless ``gguf_tokenizer`` reads them: it reads those in the last two lines."""

_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "llama.attention.causal": (True,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.max_alibi_bias": (0.0,),
    "llama.attention.scale": (0.0,),
    "llama.attn_logit_softcapping": (0.0,),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.final_logit_softcapping": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.pooling_type": (0,),
    "llama.residual_scale": (0.0, 1.0),
    "llama.rope.scaling.attn_factor": (1.0,),
    "llama.rope.scaling.yarn_attn_factor": (1.0,),
    "llama.rope.scaling.yarn_ext_factor": (1.0,),
    "llama.rope.scaling.yarn_log_multiplier": (0.0,),
    "llama.use_parallel_residual": (False,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.escape_whitespaces": (True,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.treat_whitespace_as_suffix": (False,),
}
"""Keys that change nothing at these values; at all others the model is refused."""


def parse_gguf_config(
    fields: Fields, tensors: Mapping[str, StoredTensor], divisors: tuple[float, ...], name: str
) -> ModelConfig:
    """The configuration called ``name`` of a file with the architecture ``llama``.

    ``tensors`` show what is in no key; ``divisors`` are those in ``rope_freqs.weight``. Raises UserError if a key is
    missing, malformed, unknown here or not supported.
    """
    fields.require("general.architecture", "llama")
    fields.require("general.type", "model")
    fields.require("general.quantization_version", 2)
    if _EMBEDDING not in tensors:
        raise UserError(f"{fields.where}: the weights have no tensor {_EMBEDDING!r}")
    hidden, heads = fields.whole("llama.embedding_length"), fields.whole(_HEADS)
    kv_heads = fields.whole(_KV_HEADS, heads)
    if _HEAD_DIM not in fields and hidden % heads:
        raise fields.refusal(_HEADS, f"must divide llama.embedding_length={hidden}, or the file needs {_HEAD_DIM}")
    head_dim = fields.whole(_HEAD_DIM, hidden // heads)
    if heads % kv_heads:
        raise fields.refusal(_HEADS, f"must be a multiple of {_KV_HEADS}={kv_heads}")
    if head_dim % 2:
        raise UserError(f"{fields.where}: {_HEAD_DIM}={head_dim} must be even for rotary positions")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        fields.require(key, head_dim)
    rope, context = _parse_rope(fields, divisors, head_dim)
    vocab_size = tensors[_EMBEDDING].shape[0]
    fields.require("llama.vocab_size", vocab_size)
    shape = ModelShape(
        name=name,
        num_layers=fields.whole("llama.block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.whole("llama.feed_forward_length"),
        vocab_size=vocab_size,
        max_position=context,
        tied_embeddings=_HEAD not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
    )
    config = ModelConfig(
        shape=shape,
        rope=rope,
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )
    window = fields.whole("llama.attention.sliding_window", 0, least=0)
    if 0 < window < context:
        raise fields.refusal("llama.attention.sliding_window", f"is not supported: texts may have {context} tokens")
    check_tokenizer_keys(fields)
    fields.refuse_unread((), _NEUTRAL_VALUES, _HARMLESS_KEYS)
    return config


def _parse_rope(fields: Fields, divisors: tuple[float, ...], head_dim: int) -> tuple[RopeConfig, int]:
    """(rotary positions, longest context), as in llama.cpp: a new or an old key for the factor, linear by default."""
    theta, context = fields.number("llama.rope.freq_base", 10_000.0), fields.whole("llama.context_length")
    old_factor = fields.number("llama.rope.scale_linear", 0.0, may_be_zero=True)
    factor = fields.number("llama.rope.scaling.factor", old_factor, may_be_zero=True) or 1.0
    fields.require("llama.rope.scaling.type", "linear", "none", "yarn")
    kind = fields.text("llama.rope.scaling.type", "linear")
    original = fields.whole("llama.rope.scaling.original_context_length", context)
    if divisors and len(divisors) != head_dim // 2:
        raise UserError(f"{fields.where}: rope_freqs.weight has {len(divisors)} numbers, not {head_dim // 2}")
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta, divisors=divisors), context
    stretched = max(context, stretched_context(original, factor))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor, divisors=divisors), stretched
    if theta <= 1.0:
        raise fields.refusal("llama.rope.freq_base", "must be above 1 for yarn")
    yarn = RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fields.number("llama.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("llama.rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention(factor),
        divisors=divisors,
    )
    return yarn, stretched
