"""Our decoders against transformers' on tiny models with random weights, saved and loaded as a user's model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from floodplain.model.network.config import RopeConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.linear import can_pack
from floodplain.model.network.load import load_decoder
from floodplain.model.network.rope import inverse_frequencies
from floodplain.model.weights.gguf_file import GgufFile
from floodplain.model.weights.hf_folder import HfFolder
from tests.support.decoding import BLOCK_TOKENS, Sequences, all_logits
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 80}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED, rms_norm_eps=1e-5),
    "llama-biases": transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-3.1-rope": transformers.LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-linear-rope": transformers.LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    ),
    "llama-yarn-rope": transformers.LlamaConfig(
        **GROUPED,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=16),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=48),
    "opt-norm-last": transformers.OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=48, do_layer_norm_before=False),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers with random weights (biases and norms too), and the folder where it was saved."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, mean=1.0 if parameter.dim() == 1 else 0.0)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def load(folder: Path, **options: Any) -> Decoder:
    source = HfFolder(folder)
    return load_decoder(source.config, source, dtype=torch.float32, device=CPU, block_tokens=BLOCK_TOKENS, **options)


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def write_as_gguf(path: Path, folder: Path, model: Any) -> Path:
    """Write a model as llama.cpp's converter does: Llama 3's scaling becomes a tensor."""
    config = HfFolder(folder).config
    rope, head_dim = config.rope, config.shape.head_dim
    assert rope is not None
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "lm_head" not in name or not model.config.tie_word_embeddings
    }
    keys, tensors = gguf_keys(config), gguf_tensors(config, weights)
    keys |= {"llama.attention.key_length": head_dim, "llama.context_length": 256}
    if rope.kind == "llama3":
        tensors["rope_freqs.weight"] = inverse_frequencies(RopeConfig(rope.theta), head_dim) / inverse_frequencies(
            rope, head_dim
        )
    elif rope.kind != "default":
        keys |= {
            "llama.rope.scaling.type": rope.kind,
            "llama.rope.scaling.factor": rope.factor,
            "llama.rope.scaling.original_context_length": rope.original_max_position if rope.kind == "yarn" else 256,
        }
    return write_gguf_file(path, keys, tensors)


def test_a_gguf_file_has_the_logits_of_transformers(pair: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = pair
    if model.config.model_type != "llama":
        pytest.skip("other families have other architectures in .gguf files")
    source = GgufFile(write_as_gguf(tmp_path / "m.gguf", folder, model), "m")
    decoder = load_decoder(source.config, source, dtype=torch.float32, device=CPU, block_tokens=BLOCK_TOKENS)
    torch.testing.assert_close(all_logits(decoder, TOKENS), logits_of(model, TOKENS), rtol=0, atol=1e-4)


TOKENS = [int(token) for token in torch.randint(3, 120, (90,), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("chunk_tokens", [None, 7, 1])
def test_logits_equal_transformers(pair: tuple[Any, Path], chunk_tokens: int | None) -> None:
    model, folder = pair
    ours = all_logits(load(folder), TOKENS, chunk_tokens)
    torch.testing.assert_close(ours, logits_of(model, TOKENS), rtol=0, atol=1e-4)


def test_packed_weights_and_batches_give_the_same_logits(pair: tuple[Any, Path]) -> None:
    if not can_pack(torch.float32, CPU):
        pytest.skip("this torch has no packed products")
    model, folder = pair
    sequences = Sequences(load(folder, is_packed=True), 3, 64)
    sequences.run([], [(0, TOKENS[:30]), (2, TOKENS[40:45])])
    logits = sequences.run([(0, TOKENS[30]), (2, TOKENS[45])], [(1, TOKENS[5:25])])
    expected = torch.stack((logits_of(model, TOKENS[:31])[-1], logits_of(model, TOKENS[40:46])[-1]))
    torch.testing.assert_close(logits[:2], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[2:], logits_of(model, TOKENS[5:25]), rtol=0, atol=1e-4)
