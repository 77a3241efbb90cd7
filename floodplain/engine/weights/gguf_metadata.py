"""The metadata of a ``.gguf`` file, read once for everybody in the process, and without a detour for every string."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np


@lru_cache(maxsize=2)
def read_gguf(path: Path, changed_ns: int) -> Any:
    """A ``gguf.GGUFReader`` of the file: one, as long as the file stays as it is.

    A vocabulary is hundreds of thousands of slices. ``numpy.memmap`` makes an object of its own for each, and a plain
    array over the same mapping does not: smollm2 is read in 0.5 s and not in 2.0.

    Args:
        path: The file.
        changed_ns: When it changed last (``st_mtime_ns``).

    Raises:
        OSError, ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError: It is not whole, or is none.
    """
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader(path)


@contextmanager
def shared_with_transformers(path: Path, reader: Any) -> Iterator[None]:
    """While the context is open, whoever makes a ``gguf.GGUFReader`` of this file gets the one that is there.

    ``transformers`` reads the whole metadata again to make a tokenizer, which takes longer than all the rest of
    loading, and has no way to be given them.
    """
    import gguf

    original = gguf.GGUFReader

    def find(wanted: Any, *args: Any, **options: Any) -> Any:
        return reader if Path(wanted) == path else original(wanted, *args, **options)

    gguf.GGUFReader = find
    try:
        yield
    finally:
        gguf.GGUFReader = original
