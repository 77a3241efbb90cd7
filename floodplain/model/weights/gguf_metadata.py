"""Reads the metadata of a ``.gguf`` file fast, and caches it for all callers in the process."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np


@lru_cache(maxsize=2)
def read_gguf(path: Path, changed_ns: int) -> Any:
    """A ``gguf.GGUFReader`` of the file, cached while the file does not change.

    A vocabulary has hundreds of thousands of values, and the original reader makes several arrays for each. Here an
    array of numbers is one array, and an array of strings is a list of views.

    Args:
        path: The file, whose header was checked (``gguf_header``).
        changed_ns: When it changed last (``st_mtime_ns``).

    Raises:
        OSError, ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError: It is truncated or malformed.
    """
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
            order = ">" if self.byte_order == "S" else "<"
            parts = (
                _read_strings(self.data, begin, count, order) if number is None else [self._get(begin, number, count)]
            )
            num_bytes = sum(part.nbytes for part in parts) + (8 * count if number is None else 0)
            places = list(range(len(head), len(head) + len(parts)))
            return 12 + num_bytes, [*head, *parts], places, [GGUFValueType.ARRAY, kind]

    return QuickReader(path)


def _read_strings(data: Any, position: int, count: int, order: str) -> list[memoryview]:
    """The bytes of adjacent strings, each preceded by its length, as views of ``data``."""
    view, read, strings = memoryview(data), struct.Struct(order + "Q").unpack_from, []
    for _ in range(count):
        begin = position + 8
        position = begin + read(view, position)[0]
        strings.append(view[begin:position])
    return strings
