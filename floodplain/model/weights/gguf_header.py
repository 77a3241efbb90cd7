"""Keys and tensor tables of a GGUF model: one file, or all parts of a split one (``NAME-00001-of-00003.gguf`` etc.).

Headers are read here and not by ``gguf.GGUFReader``, which loops over any count that a file states, and reads past the
file's end without noticing. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.extras import require
from floodplain.files.parsing import reason_of
from floodplain.files.reading import is_file
from floodplain.model.network.fields import Fields
from floodplain.model.weights.checkpoint import StoredTensor

MAX_ELEMENTS = 2**22
"""Most elements of all arrays together: three times a vocabulary of 262,144 tokens with scores, types and merges."""
MAX_HEADER_BYTES = 2**28
"""Most bytes of a header: twenty times the largest vocabularies with their merges."""
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
"""Most dimensions of a tensor, as in ggml."""
VERSIONS = (2, 3)
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_HARMLESS_OF_PARTS = r"general\..*"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_ENDS = "it ends inside its header"


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor in a file's table; ``begin`` is its first byte in the file, of ``row_shape`` bytes: quantised rows."""

    begin: int
    row_shape: tuple[int, ...]


class GgufParts:
    """A model in one file or several, of which ``path`` is the first, with the model's keys (``fields``).

    Raises UserError if a file cannot be read, is missing, or is not the part that it should be.
    """

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, GgufTensor] = {}
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

    def _add(self, path: Path) -> Fields:
        keys, tensors = _open(path)
        for name, tensor in tensors:
            if name in self.tensors:
                raise UserError(f"{path}: the tensor {name[:120]!r} is in {Path(self.tensors[name].file).name}, too")
            self.tensors[name] = tensor
        return Fields(keys, str(path))

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
    return Fields(_open(path)[0], str(path))


def _stated_count(path: Path) -> int:
    """The number of parts by a file's name; 1 if the name has none."""
    match = _PART_NAME.fullmatch(path.name)
    return int(match[3]) if match else 1


Header = tuple[dict[str, Any], list[tuple[str, GgufTensor]]]
"""The values of a file's keys, and its tensors with their names."""


def _open(path: Path) -> Header:
    try:
        return read_header(path, path.stat().st_mtime_ns)
    except Exception as error:  # a malformed file may cause any error
        raise UserError(f"{path}: cannot be read as a .gguf file, is it complete? ({reason_of(error)})") from error


@lru_cache(maxsize=2)
def read_header(path: Path, changed_ns: int) -> Header:
    """Read a file's header, cached while its mtime ``changed_ns`` does not change.

    Raises OSError or ValueError if it is no ``.gguf`` file, ends before its tensors do, or exceeds a limit; a malformed
    file may cause any error.
    """
    if not is_file(path):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data, path).read()
        except struct.error:
            raise ValueError(_ENDS) from None


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self._position = 4
        self._num_elements = 0

    def read(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if not version & 0xFFFF:  # its version is big-endian, and so are the numbers in its blocks
            raise ValueError("it is big-endian: convert it with gguf-convert-endian FILE little")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and {' and '.join(map(str, VERSIONS))} are supported")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._bytes().decode()
            if key in keys:
                raise ValueError(f"its key {key[:120]!r} occurs twice")
            keys[key] = self._value(self._number("I"), depth=0)
        entries = [self._entry() for _ in range(num_tensors)]
        align = keys.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise ValueError("its general.alignment is not a power of two")
        begin = -(-self._position // align) * align
        return keys, [(name, self._tensor(shape, kind, begin + offset)) for name, shape, kind, offset in entries]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with rows first, type and offset of a tensor."""
        name, num_dimensions = self._bytes().decode(), self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(self, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        require(str(self._path), "gguf")
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        known = GGMLQuantizationType(kind)
        row_shape = quant_shape_to_byte_shape(shape, known)
        if begin + math.prod(row_shape) > len(self._data):
            raise ValueError("it ends inside its tensors")
        return GgufTensor(str(self._path), shape, known.name, begin, row_shape)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._position)
        self._position += struct.calcsize(f"<{form}")
        return value

    def _bytes(self) -> bytes:
        begin = self._position + _LENGTH.size
        self._position = begin + _LENGTH.unpack_from(self._data, self._position)[0]
        if self._position > len(self._data):
            raise ValueError(_ENDS)
        if self._position > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
        return self._data[begin : self._position]

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            text = self._bytes()
            try:
                return text.decode()
            except UnicodeDecodeError:
                return text  # refused where it is read, for it is no text; an author in Latin-1 is passed over
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        self._num_elements += count
        if self._num_elements > MAX_ELEMENTS:
            raise ValueError(f"its arrays have more than {MAX_ELEMENTS} elements")
        if depth >= MAX_DEPTH:
            raise ValueError(f"arrays are nested deeper than {MAX_DEPTH} levels")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind]}"
            numbers = struct.unpack_from(form, self._data, self._position)
            self._position += struct.calcsize(form)
            return list(numbers)
        return [self._value(kind, depth + 1) for _ in range(count)]
