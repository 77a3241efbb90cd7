"""The files of a GGUF model: one, or all parts of a split model (``NAME-00001-of-00003.gguf`` and so on)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import reason_of
from floodplain.files.reading import is_file
from floodplain.model.network.fields import Fields
from floodplain.model.weights.checkpoint import StoredTensor
from floodplain.model.weights.gguf_header import check_header, read_gguf

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_HARMLESS_OF_PARTS = r"(GGUF|general)\..*"


class GgufParts:
    """A model in one file or several.

    Args:
        path: The only file, or the first part.

    Attributes:
        fields: The keys of the first file, which are those of the model.
        tensors: Tensors of all files, by name: each with its file and its ``gguf`` entry.

    Raises:
        UserError: A file cannot be read, is missing, or is not the part that it should be.
    """

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, tuple[Path, Any]] = {}
        self.fields = self._add(path)
        count = self.fields.whole(_COUNT, 1, least=0)
        number = self.fields.whole(_NO, 0, least=0)
        wanted = self.fields.whole_or_none(_NUM_TENSORS)
        if count > 1 or number > 0 or _stated_count(path) > 1:
            self._add_others(path, number, count)
        if wanted is not None and wanted != len(self.tensors):
            raise UserError(
                f"{path}: {_NUM_TENSORS} is {wanted}, and the {count} files hold {len(self.tensors)} tensors"
            )

    def stored(self) -> dict[str, StoredTensor]:
        """All tensors by name, as in the files' tables."""
        return {name: _listed(file, tensor) for name, (file, tensor) in self.tensors.items()}

    def _add(self, path: Path) -> Fields:
        reader = _open(path)
        for tensor in reader.tensors:
            if tensor.name in self.tensors:
                raise UserError(
                    f"{path}: the tensor {tensor.name[:120]!r} is in {self.tensors[tensor.name][0].name}, too"
                )
            self.tensors[tensor.name] = path, tensor
        return Fields(_Values(reader.fields), str(path))

    def _add_others(self, path: Path, number: int, count: int) -> None:
        match = _PART_NAME.fullmatch(path.name)
        if number != 0:
            first = f"{match[1]}-00001-of-{match[3]}.gguf" if match else "the first"
            raise UserError(f"{path}: this is part {number + 1} of {count}; name {first} as MODEL")
        if match is None or (int(match[2]), int(match[3])) != (1, count):
            raise UserError(
                f"{path}: its key {_COUNT} is {count}, so its name must end in -00001-of-{count:05}.gguf, "
                "with the other parts beside it"
            )
        for index in range(1, count):
            part = path.with_name(f"{match[1]}-{index + 1:05}-of-{count:05}.gguf")
            if not is_file(part):
                raise UserError(f"{part} is missing: the model is in {count} files")
            fields = self._add(part)
            fields.require(_NO, index)
            fields.require(_COUNT, count)
            fields.value(_NUM_TENSORS, None)
            fields.refuse_unread(pattern=_HARMLESS_OF_PARTS)


def read_fields(path: Path) -> Fields:
    """The keys of one file.

    Raises:
        UserError: It cannot be read.
    """
    return Fields(_Values(_open(path).fields), str(path))


def _listed(file: Path, tensor: Any) -> StoredTensor:
    return StoredTensor(str(file), tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)


def _stated_count(path: Path) -> int:
    """The number of parts by a file's name; 1 if the name has none."""
    match = _PART_NAME.fullmatch(path.name)
    return int(match[3]) if match else 1


def _open(path: Path) -> Any:
    try:
        check_header(path)
        return read_gguf(path, path.stat().st_mtime_ns)
    except Exception as error:  # the parser may raise anything on a malformed file
        raise UserError(f"{path}: cannot be read as a .gguf file, is it complete? ({reason_of(error)})") from error


class _Values(Mapping[str, Any]):
    """The values of a file's keys, each decoded when it is read, because a vocabulary takes long."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)
