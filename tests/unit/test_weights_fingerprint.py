"""Equal fingerprints mean the same model, wherever its files are; anything that changes a byte of KV changes them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from floodplain.core.errors import UserError
from floodplain.model.weights import fingerprint
from floodplain.model.weights.fingerprint import digest_files
from floodplain.model.weights.open_model import DummyModel, fingerprint_kv, open_model
from tests.support.gguf_files import gguf_keys, gguf_tensors, write_gguf_file
from tests.unit.test_weights import DUMMY, dummy_weights, write_folder, write_gguf

HERE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_tokens": 16}


def name_of(model: Path | str, seed: int = 0, **changes: Any) -> str:
    return fingerprint_kv(open_model(str(model), seed), **(HERE | changes))


def folder_at(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    return write_folder(path, **changes)


def test_the_same_content_has_one_name_in_any_folder(tmp_path: Path) -> None:
    first, second = folder_at(tmp_path / "a" / "model"), folder_at(tmp_path / "b" / "another")
    assert name_of(first) == name_of(second)
    assert name_of(write_gguf(tmp_path / "one.gguf")) == name_of(write_gguf(tmp_path / "other.gguf"))
    assert name_of(first) != name_of(tmp_path / "one.gguf")


def test_another_process_finds_the_same_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from floodplain.model.weights.open_model import fingerprint_kv, open_model;"
        "print(fingerprint_kv(open_model(sys.argv[1]), 'cpu', 'float32', 16))"
    )
    (tmp_path / "link.gguf").symlink_to(path)
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "link.gguf"], capture_output=True, check=True)
    assert ran.stdout.decode().strip() == name_of(path)


def test_one_bit_of_one_weight_is_another_model(tmp_path: Path) -> None:
    first, second = folder_at(tmp_path / "a"), folder_at(tmp_path / "b")
    weights = load_file(second / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[5, 7] ^= 1
    save_file(weights, second / "model.safetensors")
    assert name_of(first) != name_of(second)


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    names = set()
    tensors = list(gguf_tensors(DUMMY.config, dummy_weights()).items())
    for changed in (None, 0, 1):
        folder = tmp_path / str(changed)
        folder.mkdir()
        for part, some in enumerate((dict(tensors[:9]), dict(tensors[9:]))):
            if part == changed:
                some[next(iter(some))].flatten()[3] += 1
            keys = gguf_keys(DUMMY.config) if part == 0 else {}
            keys |= {"split.no": part, "split.count": 2, "split.tensors.count": len(tensors)}
            write_gguf_file(folder / f"m-{part + 1:05}-of-00002.gguf", keys, some)
        names.add(name_of(folder / "m-00001-of-00002.gguf"))
    assert len(names) == 3


@pytest.mark.parametrize("change", [{"rms_norm_eps": 2e-5}, {"rope_theta": 5e5}, {"max_position_embeddings": 1024}])
def test_a_key_of_the_configuration_is_another_model(tmp_path: Path, change: dict[str, Any]) -> None:
    assert name_of(folder_at(tmp_path / "a")) != name_of(folder_at(tmp_path / "b", **change))


def test_a_key_that_changes_no_number_is_none(tmp_path: Path) -> None:
    assert name_of(folder_at(tmp_path / "a")) == name_of(folder_at(tmp_path / "b", initializer_range=0.5))


def test_settings_that_change_bytes_change_the_name() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"block_tokens": 32},
        {"device": "cuda"},
        {"seed": 1},
    ]
    names = [name_of("dummy:tiny-llama", **change) for change in changes]
    assert len({*names, name_of("dummy:tiny-qwen"), name_of("dummy:tiny-opt")}) == len(changes) + 2
    assert name_of("dummy:tiny-llama", device="cuda:1") == name_of("dummy:tiny-llama", device="cuda:0")


def test_a_dummy_is_its_shape_whatever_that_is_called() -> None:
    renamed = DummyModel("tiny-llama")
    renamed.config = replace(renamed.config, shape=replace(renamed.config.shape, name="other"))
    assert fingerprint_kv(renamed, **HERE) == name_of("dummy:tiny-llama")


def test_a_file_is_hashed_whole_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_PART_BYTES", 100)
    monkeypatch.setattr(fingerprint, "_READ_BYTES", 32)

    def lists(fields: list[bytes]) -> bytes:
        return hashlib.sha256(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).digest()

    seen = set()
    for size in (0, 1, 32, 99, 100, 101, 250):
        for changed in {0, size // 2, size - 1} if size else {0}:
            content = bytearray(range(size))
            content[changed : changed + 1] = b"x" if size else b""
            path = tmp_path / f"{size}-{changed}"
            path.write_bytes(content)
            parts = [hashlib.sha256(content[begin : begin + 100]).digest() for begin in range(0, size, 100)]
            found = digest_files([path])
            assert found == lists([lists(parts)])
            seen.add(found)
    assert len(seen) == 17


def test_a_file_that_changes_or_goes_is_seen(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "a")
    source, before = open_model(str(folder)), name_of(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b" ")
    assert fingerprint_kv(source, **HERE) != before
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        fingerprint_kv(source, **HERE)
