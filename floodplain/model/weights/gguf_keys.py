"""Keys of a ``.gguf`` file that change no logit, and no token unless ``gguf_tokenizer`` reads them."""

from __future__ import annotations

HARMLESS_KEYS = (
    r"(?!general\.|llama\.|tokenizer\.|split\.|adapter\.).*"  # of no namespace that llama.cpp reads
    r"|general\.(?!type$|architecture$).*"
    r"|llama\.(tensor_data_layout|rope\.scaling\.finetuned)"
    r"|tokenizer\.(chat_template(\..*)?|chat_templates|huggingface\.json)"
    r"|tokenizer\.ggml\.(tokens|token_type|token_type_count|scores|merges|[a-z_]+_token_id|add_bos_token|add_eos_token)"
)
"""``gguf_tokenizer`` reads the keys in the last two lines."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
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
