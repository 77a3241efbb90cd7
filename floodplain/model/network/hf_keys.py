"""Keys of a HF ``config.json`` that change no logit, at any value or at neutral values.

``refuse_unread`` compares unread keys with these lists; all other keys are read, or the model is refused.
"""

from __future__ import annotations

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

HARMLESS_KEYS = frozenset(" ".join((_ABOUT_THE_FILE, _OF_TRAINING, _OF_THE_CALLER, _OF_SAMPLING)).split())
"""Keys that change no logit at any value. Sampling is set by requests."""

TOKEN_IDS = (
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id",
)  # fmt: skip
"""Keys with token ids. They change no logit; ``eos_token_id`` ends a text."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
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
