from __future__ import annotations

from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.engine.models.config import ModelConfig, RopeConfig
from floodplain.engine.models.hf_config import parse_hf_config

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
            "architectures is 'MixtralForCausalLM'; supported are Llama",
        ),
        (LLAMA, {"architectures": None}, "architectures is None"),
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
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
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
