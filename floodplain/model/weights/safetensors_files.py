"""The safetensors files of a folder: one, or shards with an index that maps tensors to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from floodplain.core.errors import UserError
from floodplain.files.parsing import parsing, read_json_object, reason_of
from floodplain.files.reading import is_file
from floodplain.model.weights.checkpoint import StoredTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAME_WEIGHTS = "consolidated*.safetensors"
"""Mistral publishes the weights a second time, under the names of its own code."""


class SafetensorsFiles:
    """All tensors of the files that make up the model in ``folder``.

    Attributes:
        tensors: All tensors by name.

    Raises:
        UserError: A file is missing or cannot be read, or files and index differ.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}
        index = self._read_index()
        files = sorted(set(index.values())) if index is not None else [_SINGLE]
        self._refuse_other_files(files)
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            self._add(file, index)
        missing = next((name for name in index or () if name not in self.tensors), None)
        if index is not None and missing is not None:
            raise UserError(f"{folder / index[missing]}: the tensor {missing[:120]!r} is missing, which {_INDEX} names")

    def read(self, name: str) -> torch.Tensor:
        """The tensor called ``name``.

        Raises:
            UserError: It cannot be read.
        """
        path = Path(self.tensors[name].file)
        with parsing(f"{path}: {name}"):
            tensor: torch.Tensor = self._open(path.name).get_tensor(name)
        return tensor

    def _add(self, file: str, index: dict[str, str] | None) -> None:
        path = self._folder / file
        with parsing(path):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                if index is not None and index.get(name) != file:
                    raise UserError(f"{path}: the tensor {name[:120]!r} is not in {_INDEX} with this file")
                view = opened.get_slice(name)
                self.tensors[name] = StoredTensor(str(path), tuple(view.get_shape()), str(view.get_dtype()))

    def _read_index(self) -> dict[str, str] | None:
        """The file of each tensor, which is in the folder itself; None for a single file without an index."""
        path = self._folder / _INDEX
        if not is_file(path):
            if not is_file(self._folder / _SINGLE):
                raise UserError(
                    f"{self._folder}: neither {_SINGLE} nor {_INDEX} is there; convert the weights to safetensors"
                )
            return None
        index = read_json_object(path, keys_once=False).get("weight_map")
        if not isinstance(index, dict):
            raise UserError(f"{path}: weight_map is missing")
        for file in index.values():
            is_name = isinstance(file, str) and 0 < len(file) < 256 and file.isprintable()
            if not (is_name and Path(file).name == file):
                raise UserError(f"{path}: weight_map names {str(file)[:80]!r}, which is not a file of this folder")
        return index

    def _refuse_other_files(self, files: list[str]) -> None:
        for path in sorted(self._folder.glob("*.safetensors")):
            if path.name not in files and not path.match(_SAME_WEIGHTS):
                listed = f"is not in {_INDEX}" if files != [_SINGLE] else f"is not read beside {_SINGLE}"
                raise UserError(f"{path}: this file of weights {listed}; remove it, or list its tensors there")

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            path = self._folder / file
            if not is_file(path):  # a pipe would block
                raise UserError(f"{path}: cannot be read, is it complete? (it is missing, or not a regular file)")
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except Exception as error:  # the format is parsed in Rust, which raises several kinds
                raise UserError(f"{path}: cannot be read, is it complete? ({reason_of(error)})") from None
        return self._opened[file]
