"""Keys and tensor tables of a GGUF model: one file, or all parts of a split one (``NAME-00001-of-00003.gguf`` etc.).

A header is parsed only after a check that it ends inside its file: the parsers of ``gguf`` and ``transformers`` loop
over the counts in a file, and read past its end without noticing.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from floodplain.core.errors import UserError
from floodplain.files.extras import require
from floodplain.files.parsing import reason_of
from floodplain.files.reading import is_file
from floodplain.model.network.fields import Fields
from floodplain.model.weights.checkpoint import StoredTensor

MAX_ELEMENTS = 2**22
"""Most elements of all arrays together: three times a vocabulary of 262,144 tokens with scores, types and merges."""
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
"""Most dimensions of a tensor, as in ggml."""
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_HARMLESS_OF_PARTS = r"(GGUF|general)\..*"
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class GgufParts:
    """A model in one file or several, of which ``path`` is the first, with the model's keys (``fields``).

    ``tensors`` has each one's file and ``gguf`` entry. Raises UserError if a file cannot be read, is missing, or is not
    the part that it should be.
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
    """The keys of one file. Raises UserError if it cannot be read."""
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


def check_header(path: Path) -> None:
    """Walk a file's metadata and tensor table.

    Raises OSError or ValueError if it is no ``.gguf`` file, ends inside its header, or exceeds a limit.
    """
    if not is_file(path):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _Walk(data).walk()
        except struct.error:
            raise ValueError("it ends inside its header") from None


@lru_cache(maxsize=2)
def read_gguf(path: Path, changed_ns: int) -> Any:
    """A ``gguf.GGUFReader`` of a file with a checked header, cached while its mtime ``changed_ns`` does not change.

    A vocabulary has hundreds of thousands of values, and the original reader makes several arrays for each. Here an
    array of numbers is one array, and an array of strings is a list of views. A malformed file may raise any error.
    """
    require(str(path), "gguf")

    from gguf import GGUFReader, GGUFValueType

    class QuickReader(GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            head = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            begin, kind, count = orig_offs + 12, GGUFValueType(int(head[0][0])), int(head[1][0])
            number = self.gguf_scalar_to_np.get(kind)
            if count == 0 or (number is None and kind != GGUFValueType.STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            parts = _read_strings(self.data, begin, count) if number is None else [self._get(begin, number, count)]
            num_bytes = sum(part.nbytes for part in parts) + (8 * count if number is None else 0)
            places = list(range(len(head), len(head) + len(parts)))
            return 12 + num_bytes, [*head, *parts], places, [GGUFValueType.ARRAY, kind]

    return QuickReader(path)


class _Walk:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 4
        self._num_elements = 0

    def walk(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if not self._number("I") & 0xFFFF:  # its version is big-endian, and so are the numbers in its blocks
            raise ValueError("it is big-endian: convert it with gguf-convert-endian FILE little")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for _ in range(num_keys):
            self._skip_string()
            self._skip_value(self._number("I"), depth=0)
        for _ in range(num_tensors):
            self._skip_string()
            num_dimensions = self._number("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            self._skip(8 * num_dimensions + 12)  # sizes, type, offset

    def _number(self, kind: str) -> int:
        value: int
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._position)
        self._position += struct.calcsize(f"<{kind}")
        return value

    def _skip(self, num_bytes: int) -> None:
        self._position += num_bytes
        if self._position > len(self._data):
            raise ValueError("it ends inside its header")

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip_strings(self, count: int) -> None:
        """Skip strings in one loop: a vocabulary and its merges are most of a header, and a call for each is slow."""
        read, position, end = struct.Struct("<Q").unpack_from, self._position, len(self._data)
        for _ in range(count):
            position += 8 + read(self._data, position)[0]
            if position > end:
                raise ValueError("it ends inside its header")
        self._position = position

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array(depth + 1)
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _skip_array(self, depth: int) -> None:
        kind, count = self._number("I"), self._number("Q")
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(f"its arrays have more than {MAX_ELEMENTS} elements")
        if depth > MAX_DEPTH:
            raise ValueError(f"arrays are nested deeper than {MAX_DEPTH} levels")
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
            return
        if kind == _STRING:
            self._skip_strings(count)
            return
        for _ in range(count):
            self._skip_value(kind, depth)


def _read_strings(data: Any, position: int, count: int) -> list[memoryview]:
    """The bytes of adjacent strings, each preceded by its length, as views of ``data``."""
    view, read, strings = memoryview(data), struct.Struct("<Q").unpack_from, []
    for _ in range(count):
        begin = position + 8
        position = begin + read(view, position)[0]
        strings.append(view[begin:position])
    return strings
