"""A Hugging Face folder: ``config.json``, safetensors in one file or several, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.engine.hf_tokenizer import HfTokenizer
from floodplain.engine.models.config import ModelConfig
from floodplain.engine.models.hf_config import parse_hf_config
from floodplain.files.parsing import parsing, read_json_object, reason_of
from floodplain.files.reading import is_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HfFolder:
    """A model in ``folder``; its name is the folder's.

    Raises:
        UserError: A file is missing or cannot be read, or the model is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self.config = _read_config(folder / "config.json", self.name)
        self._folder = folder
        self._open_files: dict[str, Any] = {}
        self._file_of = self._index()

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write one tensor into ``target``. Checkpoints of the bare decoder leave out the prefix ``model.``."""
        for stored in (name, name.removeprefix("model.")):
            file = self._file_of.get(stored)
            if file is not None:
                _copy(target, self._read(file, stored), f"{self._folder / file}: {stored}")
                return
        raise UserError(f"{self._folder}: the weights have no tensor {name!r}")

    def load_tokenizer(self) -> HfTokenizer:
        """The folder's tokenizer."""
        return HfTokenizer.from_folder(self._folder)

    def _index(self) -> dict[str, str]:
        if is_file(self._folder / _INDEX):
            return _read_index(self._folder / _INDEX)
        if not is_file(self._folder / _SINGLE):
            raise UserError(
                f"{self._folder}: neither {_SINGLE} nor {_INDEX} is there; convert the weights to safetensors"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open_files:
            path = self._folder / file
            if not is_file(path):  # a pipe would block
                raise UserError(f"{path}: cannot be read, is it complete? (it is missing, or not a regular file)")
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except Exception as error:  # the format is parsed in Rust, which raises several kinds
                raise UserError(f"{path}: cannot be read, is it complete? ({reason_of(error)})") from None
        return self._open_files[file]

    def _read(self, file: str, name: str) -> torch.Tensor:
        with parsing(f"{self._folder / file}: {name}"):
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        return tensor


def _copy(target: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    if tensor.shape != target.shape:
        raise UserError(f"{what} has shape {tuple(tensor.shape)}, config.json says {tuple(target.shape)}")
    target.copy_(tensor)


def _read_config(path: Path, name: str) -> ModelConfig:
    if not is_file(path):
        raise UserError(f"{path} is missing; MODEL must be a folder with a complete Hugging Face model")
    content = read_json_object(path)
    with parsing(path):
        return parse_hf_config(content, name, str(path))


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor; every file lies in the folder itself."""
    index = read_json_object(path).get("weight_map")
    if not isinstance(index, dict):
        raise UserError(f"{path}: weight_map is missing")
    for file in index.values():
        if not (isinstance(file, str) and file and Path(file).name == file):
            raise UserError(f"{path}: weight_map names {str(file)[:80]!r}, which is not a file of this folder")
    return index
