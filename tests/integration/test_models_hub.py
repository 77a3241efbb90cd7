"""Models by their names on the hub, from a cache in its layout, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from floodplain.model.weights.peek import hub_folder, is_hub_id

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
REVISIONS = {"main": "a" * 40, "v2": "b" * 40}
SCRIPT = """
import sys
from floodplain.core.errors import UserError
from floodplain.model.weights.peek import peek_shape
try:
    print(peek_shape(sys.argv[1]).num_layers)
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two revisions of one model: three layers, and five."""
    cache = tmp_path_factory.mktemp("hub")
    model = cache / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    for (name, commit), num_layers in zip(REVISIONS.items(), (3, 5), strict=True):
        (model / "refs" / name).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
        (snapshot / "tokenizer.json").write_text("{}")
    return cache


def peek(model: str, cache: Path) -> str:
    environ = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("org/tiny", "3"),
        ("org/tiny@v2", "5"),
        (f"org/tiny@{REVISIONS['v2']}", "5"),
        (
            "org/other",
            "'org/other' is no file or folder here, and as a model of the Hugging Face hub: it is not in the",
        ),
        ("org/tiny@v3", "'org/tiny@v3' is no file or folder here"),
        ("org/model--x", "'org/model--x' is no file or folder here, and as a model of the Hugging Face hub: it is not"),
    ],
)
def test_a_model_of_the_hub_comes_from_the_cache(cache: Path, model: str, shown: str) -> None:
    found = peek(model, cache)
    assert found.startswith(shown) and "\n" not in found


def test_a_snapshot_without_files_that_are_not_needed_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Incomplete(FileNotFoundError):
        snapshot_path = str(tmp_path)

    def download(name: str, **_: object) -> str:
        raise Incomplete("LICENSE.txt is missing")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub_folder("org/tiny") == tmp_path


def test_weights_that_are_not_read_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = [
        "config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja", "model-00001-of-00002.safetensors",
        "consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "onnx/model.safetensors", "model.bin",
    ]  # fmt: skip
    seen: list[str] = []

    def download(name: str, revision: str | None, **patterns: list[str]) -> str:
        seen.extend(filter_repo_objects(published, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub_folder("mistralai/Mistral-7B-Instruct-v0.3") == tmp_path
    assert seen == published[:4]


@pytest.mark.parametrize("model", ["a", "/a/b", "./a/b", "../a", "a/b/c", "a/b@", "a b/c", "~/a", "dummy:a/b"])
def test_paths_are_no_names_of_the_hub(model: str) -> None:
    assert not is_hub_id(model)
    assert is_hub_id("org/tiny") and is_hub_id("Org-1/Tiny.v2@refs/pr/7")
