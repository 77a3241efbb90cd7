"""A Hugging Face folder: ``config.json``, safetensors in one file or several, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.engine.hf_tokenizer import HfTokenizer
from floodplain.engine.models.config import parse_hf_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HfFolder:
    """A model in ``folder``; its name is the folder's.

    Raises:
        UserError: A file is missing or cannot be read, or the model is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self.config = parse_hf_config(_read_json(folder / "config.json"), self.name)
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
        if (self._folder / _INDEX).is_file():
            index = _read_json(self._folder / _INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise UserError(f"{self._folder / _INDEX}: weight_map is missing")
            return {str(name): str(file) for name, file in index.items()}
        if not (self._folder / _SINGLE).is_file():
            raise UserError(
                f"{self._folder}: neither {_SINGLE} nor {_INDEX} is there; convert the weights to safetensors"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{self._folder / file}: cannot be read, is it complete? ({_one_line(error)})"
                ) from None
        return self._open_files[file]

    def _read(self, file: str, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{self._folder / file}: {name} cannot be read ({_one_line(error)})") from None
        return tensor


def _copy(target: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    if tensor.shape != target.shape:
        raise UserError(f"{what} has shape {tuple(tensor.shape)}, config.json says {tuple(target.shape)}")
    target.copy_(tensor)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; MODEL must be a folder with a complete Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({_one_line(error)})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
