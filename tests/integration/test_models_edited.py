"""Each key of a configuration is changed in turn: our logits equal transformers', or the error names the key.

A key that is silently dropped would leave the logits unchanged; the last test drops keys as a negative control.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from floodplain.core.errors import UserError
from floodplain.model.network.fields import Fields
from floodplain.model.network.load import load_decoder
from floodplain.model.weights.hf_folder import HfFolder
from tests.support.decoding import BLOCK_TOKENS, all_logits

# -- a folder of a tiny model whose ``config.json`` is edited; compares our logits with transformers' ------------------


MISSING = object()
"""The value of a key that is removed."""
TOLERANCE = 1e-3


class EditedFolder:
    """A model of transformers with random weights, and the ``config`` that ``save_pretrained`` wrote in ``folder``."""

    def __init__(self, folder: Path, config: Any) -> None:
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, mean=1.0 if parameter.dim() == 1 else 0.0)
        model.save_pretrained(folder)
        self._folder = folder
        self._tokens = torch.randint(3, config.vocab_size, (48,), generator=torch.Generator().manual_seed(1)).tolist()
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def fault_of(self, changes: Mapping[str, Any], name: str) -> str | None:
        """The fault of our logits for changed keys; None if they equal transformers' or a refusal has ``name``.

        ``changes`` are keys by path (``rope_parameters.factor``), with their new values.
        """
        (self._folder / "config.json").write_text(json.dumps(_edited(self.config, changes)))
        ours = self._ours()
        if isinstance(ours, str):
            return None if name in ours else f"{dict(changes)}: refused without naming {name}: {ours}"
        try:
            theirs = self._theirs(len(ours))
        except Exception as error:  # any error of a folder that it cannot load
            return f"{dict(changes)}: loaded, and transformers refuses it: {type(error).__name__}: {error}"
        distance = float((ours - theirs).abs().max())
        return None if distance < TOLERANCE else f"{dict(changes)}: dropped in silence, logits differ by {distance}"

    def unused_tensors(self) -> list[str]:
        """Return tensors of the checkpoint whose change does not change our logits."""
        (self._folder / "config.json").write_text(json.dumps(self.config))
        file = self._folder / "model.safetensors"
        stored, usual = load_file(file), self._ours()
        assert isinstance(usual, torch.Tensor), usual
        unused = []
        for name, tensor in stored.items():
            save_file({**stored, name: tensor.flip(0) * 1.5}, file)
            ours = self._ours()
            if isinstance(ours, torch.Tensor) and torch.allclose(ours, usual, rtol=0, atol=TOLERANCE):
                unused.append(name)
        save_file(stored, file)
        return unused

    def _ours(self) -> torch.Tensor | str:
        try:
            source = HfFolder(self._folder)
        except UserError as error:
            return str(error)
        model = load_decoder(
            source.config, source, dtype=torch.float32, device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
        )
        return all_logits(model, self._tokens[: source.config.shape.max_position])

    def _theirs(self, num_tokens: int) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([self._tokens[:num_tokens]])).logits[0]
        return logits


def _edited(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    edited: dict[str, Any] = deepcopy(dict(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        mapping = edited
        for parent in parents:
            mapping = mapping[parent]
        if value is MISSING:
            mapping.pop(key, None)
        else:
            mapping[key] = value
    return edited


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED, attention_bias=True),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=None, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=16),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=48),
}
LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 50.0, **LLAMA3},
    {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.5, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.7},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32, "factor": 4.0},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 32, "attention_factor": 1.2},
]
REFUSED_ROPES: list[tuple[str, dict[str, Any]]] = [
    ("proportional", {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    ("axial", {"rope_type": "axial", "rope_theta": 50.0}),
    ("partial_rotary_factor", {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}),
    ("full_attention", {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}),
]
FOREIGN: dict[str, Any] = {
    "attention_bias": True,
    "attention_chunk_size": 8,
    "attention_multiplier": 0.2,
    "clip_qkv": 1.0,
    "embedding_multiplier": 2.0,
    "final_logit_softcapping": 10.0,
    "is_causal": False,
    "layer_types": ["full_attention", "sliding_attention"],
    "logits_scaling": 3.0,
    "max_window_layers": 1,
    "mlp_bias": True,
    "num_experts": 4,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "residual_multiplier": 0.5,
    "rope_interleaved": True,
    "rope_theta": 300.0,
    "sliding_window": 16,
    "use_qk_norm": True,
    "use_sliding_window": True,
}


Edits = Iterator[tuple[dict[str, Any], str]]
"""Changes of a configuration, and the key that a refusal must name."""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EditedFolder:
    return EditedFolder(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> EditedFolder:
    return EditedFolder(tmp_path_factory.mktemp("rope"), transformers.LlamaConfig(**GROUPED))


def other_values(value: object) -> Iterator[Any]:
    """Other values of the same type; for ``null``, numbers."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value // 2 or 5)
    elif isinstance(value, float):
        yield value * 3 + 0.1
    elif value is None:
        yield from (2, 0.5)
    elif isinstance(value, list) and value and isinstance(value[0], float):
        yield from ([2 * one for one in value], value[:-1])


def faults(folder: EditedFolder, edits: Edits) -> list[str]:
    return [fault for changes, name in edits if (fault := folder.fault_of(changes, name)) is not None]


def test_the_configuration_that_transformers_writes_is_loaded_right(folder: EditedFolder) -> None:
    assert folder.fault_of({}, "no key at all") is None


def test_every_tensor_changes_the_logits(folder: EditedFolder) -> None:
    # Without rotation, the bias of keys adds the same to all scores of a query.
    assert all(folder.config["model_type"] == "opt" and "k_proj.bias" in name for name in folder.unused_tensors())


def test_every_key_changed_or_removed_is_computed_or_named(folder: EditedFolder) -> None:
    def edits() -> Edits:
        for key, value in folder.config.items():
            yield from (({key: other}, key) for other in other_values(value))
            if key != "model_type":  # only transformers needs it
                yield {key: MISSING}, key

    assert faults(folder, edits()) == []


def test_every_key_of_other_families_is_computed_or_named(folder: EditedFolder) -> None:
    foreign = {key: value for key, value in FOREIGN.items() if key not in folder.config}
    assert faults(folder, (({key: value}, key) for key, value in foreign.items())) == []


def test_a_sliding_window_is_named_only_if_it_hides_something(folder: EditedFolder) -> None:
    def edits() -> Edits:
        for window in (16, 63, 64, 128):
            yield {"sliding_window": window}, "sliding_window"
            for types in (MISSING, ["full_attention", "sliding_attention"], ["full_attention"] * 2):
                for first in (0, 1, 2):
                    switched = {"use_sliding_window": True, "max_window_layers": first, "layer_types": types}
                    yield {**switched, "sliding_window": window}, "sliding_window"

    if "rope_parameters" not in folder.config:
        pytest.skip("OPT has no windows")
    is_switched = "use_sliding_window" in folder.config
    wanted = [edit for edit in edits() if is_switched or len(edit[0]) == 1]
    assert faults(folder, iter(wanted)) == []


@pytest.mark.parametrize(("key", "rope"), REFUSED_ROPES)
def test_rope_that_is_not_computed_is_named(llama: EditedFolder, key: str, rope: dict[str, Any]) -> None:
    for place in ("rope_parameters", "rope_scaling"):
        fault = llama.fault_of({"rope_parameters": MISSING, place: rope}, "no key at all")
        assert key in (fault or "")


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join([rope["rope_type"], *list(rope)[1:][-1:]]))
def test_every_kind_of_rope_is_computed_or_named(llama: EditedFolder, rope: dict[str, Any]) -> None:
    plain = {"rope_parameters": MISSING}
    old = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    without_theta = {key: value for key, value in rope.items() if key != "rope_theta"}
    whole: list[dict[str, Any]] = [
        {"rope_parameters": rope},
        {"rope_parameters": old},
        {**plain, "rope_scaling": rope},
        {**plain, "rope_scaling": old, "rope_theta": 300.0},
        {**plain, "rope_scaling": without_theta, "rope_theta": 300.0, "original_max_position_embeddings": 24},
        {"rope_scaling": rope},
        {"rope_scaling": without_theta},
    ]

    def edits() -> Edits:
        yield from ((changes, "rope_") for changes in whole)
        for key, value in rope.items():
            rest = {other: rope[other] for other in rope if other != key}
            yield {"rope_parameters": rest}, key
            for other in other_values(value):
                yield {"rope_parameters": {**rest, key: other}}, key

    assert faults(llama, edits()) == []


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("rope_theta", {"rope_parameters.rope_theta": 3000.0}),
        ("factor", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("beta_slow", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1.7}}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("rope_scaling", {"rope_scaling": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
        ("rms_norm_eps", {"rms_norm_eps": 0.2}),
    ],
)
def test_a_key_that_is_dropped_in_silence_is_caught(
    llama: EditedFolder, monkeypatch: pytest.MonkeyPatch, key: str, changes: dict[str, Any]
) -> None:
    read = Fields.value
    usual = {"rms_norm_eps": 0.05, "hidden_act": "silu", "factor": 1.0, "rope_theta": 100.0}

    def drop(self: Fields, name: str, *default: object) -> Any:
        value = read(self, name, *default)
        return usual.get(key) if name == key else value

    assert llama.fault_of(changes, key) is None
    monkeypatch.setattr(Fields, "value", drop)
    assert "dropped in silence" in (llama.fault_of(changes, key) or "")
