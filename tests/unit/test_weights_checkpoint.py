"""No tensor, weight file or shard of a folder is ignored silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from floodplain import LLM, SamplingParams
from floodplain.core.errors import UserError
from floodplain.model.weights.hf_folder import HfFolder
from tests.unit.test_weights import DUMMY, dummy_weights, logits_of, refusal, write_folder

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
