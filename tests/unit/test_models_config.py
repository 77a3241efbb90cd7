from __future__ import annotations

from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.model.network.config import ModelConfig, RopeConfig
from floodplain.model.network.hf_config import parse_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "activation_function": "relu",
    "word_embed_proj_dim": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def parse(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_hf_config({**base, **changes}, "m")


def test_sizes_and_defaults() -> None:
    config = parse(LLAMA)
    shape = config.shape
    assert (shape.q_size, shape.kv_size, shape.num_layers, shape.ffn_size) == (64, 32, 2, 128)
    assert (shape.tied_embeddings, shape.qkv_bias, config.qk_norm, config.norm_eps) == (False, False, False, 1e-6)
    assert config.rope == RopeConfig(10_000.0)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0)),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(7.0, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 256)),
    ],
)
def test_rope_is_read_as_old_and_new_versions_of_transformers_write_it(
    changes: dict[str, Any], rope: RopeConfig
) -> None:
    assert parse(LLAMA, **changes).rope == rope


def test_null_is_an_absent_key() -> None:
    rope = {"rope_theta": 5e5, "rope_type": "default", "type": None, "partial_rotary_factor": None}
    assert parse(LLAMA, rope_theta=None, rope_parameters=rope) == parse(LLAMA, rope_theta=5e5)


def test_families_differ_where_they_should() -> None:
    assert parse(LLAMA, architectures=["Qwen2ForCausalLM"]).shape.qkv_bias
    assert parse(LLAMA, architectures=["Qwen3ForCausalLM"], head_dim=32).qk_norm
    opt = parse(OPT, do_layer_norm_before=False)
    assert (opt.rope, opt.o_bias, opt.shape.qkv_bias, opt.norm_first) == (None, True, True, False)
    assert opt.shape.tied_embeddings


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            LLAMA,
            {"architectures": ["MixtralForCausalLM"]},
            "architectures is 'MixtralForCausalLM' and model_type None; supported are Llama",
        ),
        (LLAMA, {"architectures": None, "model_type": "gpt2"}, "architectures is None and model_type 'gpt2'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "one alone"),
        (LLAMA, {"model_type": "mistral"}, "model_type='mistral' is not supported, only 'llama'"),
        (LLAMA, {"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type='proportional'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_scaling.type='linear'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "the field 'rope_scaling.factor' is missing"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 8}}, "rope_scaling.alpha=8"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
            "rope_parameters.rope_theta=500000.0",
        ),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported: use a .gguf"),
        (LLAMA, {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
        (LLAMA, {"head_dim": 15}, "head_dim=15 must be even"),
        (LLAMA, {"vocab_size": 0}, "vocab_size=0 must be a whole number"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size='many' must be a whole number"),
        (LLAMA, {"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers=True"),
        (LLAMA, {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        (LLAMA, {"logits_scaling": 8.0}, "logits_scaling=8.0 is not supported"),
        (LLAMA, {"final_softcap": 30.0}, "final_softcap=30.0 is not supported: no code reads this key"),
        (LLAMA, {"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window=128"),
        (
            LLAMA,
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 128,
                "max_window_layers": 1,
            },
            "sliding_window=128",
        ),
        (
            LLAMA,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=['full_attention', 'sliding_attention']",
        ),
        (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
        (OPT, {"activation_function": "gelu"}, "activation_function='gelu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(base, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match="the field 'intermediate_size' is missing"):
        parse_hf_config({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, "m")


@pytest.mark.parametrize("unused", [{"sliding_window": 512}, {"sliding_window": None}])
def test_a_sliding_window_that_hides_nothing_is_accepted(unused: dict[str, Any]) -> None:
    assert parse(LLAMA, architectures=["MistralForCausalLM"], **unused)
    assert parse(LLAMA, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=8)


WRITTEN_BY_TRANSFORMERS_4: dict[str, Any] = {
    "_name_or_path": "x", "add_cross_attention": False, "attention_bias": False, "attention_dropout": 0.0,
    "bad_words_ids": None, "begin_suppress_tokens": None, "bos_token_id": 1, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "eos_token_id": 2,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "mlp_bias": False, "model_type": "llama", "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "pad_token_id": None, "prefix": None, "pretraining_tp": 1, "problem_type": None, "pruned_heads": {},
    "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
    "rope_scaling": None, "rope_theta": 10000.0, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tie_word_embeddings": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torch_dtype": "bfloat16",
    "torchscript": False, "transformers_version": "4.46.0", "typical_p": 1.0, "use_bfloat16": False, "use_cache": True,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Yi": {"auto_map": {"AutoConfig": "configuration_yi.YiConfig"}, "pretraining_tp": 1, "rope_theta": 5e6},
    "Llama 3.1": {
        "rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "eos_token_id": [128001, 128008, 128009],
        "bos_token_id": 128000, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    "Mistral 0.3": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "model_type": "mistral"},
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 28,
        "sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1e6, "use_mrope": False,
    },
    "Qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "max_window_layers": 36, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
    },
    "fine-tuned": {"unsloth_version": "2024.9", "unsloth_fixed": True, "neftune_noise_alpha": 5, "use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("changes", [WRITTEN_BY_TRANSFORMERS_4, *PUBLISHED.values()], ids=["4.46", *PUBLISHED])
def test_configurations_as_they_are_published_are_accepted(changes: dict[str, Any]) -> None:
    assert parse(LLAMA, **changes)


def test_keys_as_published_of_opt_are_accepted() -> None:
    published = {
        "_remove_final_layer_norm": False, "attention_dropout": 0.0, "do_layer_norm_before": True, "dropout": 0.1,
        "enable_bias": True, "init_std": 0.02, "layer_norm_elementwise_affine": True, "layerdrop": 0.0,
        "model_type": "opt", "prefix": "</s>", "torch_dtype": "float16", "use_cache": True,
    }  # fmt: skip
    assert parse(OPT, **published) == parse(OPT)


def test_the_context_is_as_long_as_its_frequencies_are_right() -> None:
    def context_of(**rope: Any) -> int:
        return parse(LLAMA, rope_scaling=rope).shape.max_position

    assert context_of(type="linear", factor=4.0) == 2048
    assert context_of(type="linear", factor=1e300) == 2**53
    assert context_of(type="dynamic", factor=4.0) == 512
    assert context_of(type="yarn", factor=4.0, original_max_position_embeddings=256) == 1024
    assert context_of(type="yarn", factor=4.0, original_max_position_embeddings=64) == 512
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert context_of(type="longrope", **factors, original_max_position_embeddings=128) == 128
    assert parse(LLAMA, architectures=["MistralForCausalLM"], sliding_window=512)
    with pytest.raises(UserError, match="sliding_window=512"):
        scaled = {"type": "linear", "factor": 2.0}
        parse(LLAMA, architectures=["MistralForCausalLM"], sliding_window=512, rope_scaling=scaled)
