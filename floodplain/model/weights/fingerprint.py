"""Hashes of a model's files, for its fingerprint. A sample of a file would miss single edited matrices (design 011)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from floodplain.files.cores import count_cores
from floodplain.files.parsing import parsing

_PART_BYTES = 2**24
"""Bytes that one thread hashes at a time. Part of the definition: a file's hash is the hash of its parts' hashes."""
_READ_BYTES = 2**20
_MAX_THREADS = 16


def digest_files(files: Sequence[Path]) -> bytes:
    """The hash of these files' bytes, in this order, cached while they are unchanged. Raises UserError."""
    return digest_fields([_digest_unchanged(file) for file in files])


def _digest_unchanged(file: Path) -> bytes:
    with parsing(file):
        now = file.stat()
        return _digest_file(file, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))


@lru_cache(maxsize=256)
def _digest_file(file: Path, state: tuple[int, ...]) -> bytes:
    """The hash of the file; cached by ``state`` (device, inode, size, mtime) for all engines of the process."""
    num_threads = min(_MAX_THREADS, count_cores())
    with file.open("rb") as opened, ThreadPoolExecutor(num_threads) as threads:
        size = os.fstat(opened.fileno()).st_size
        begins = range(0, size, _PART_BYTES)
        return digest_fields(threads.map(lambda begin: _digest_part(opened.fileno(), begin), begins))


def _digest_part(fd: int, begin: int) -> bytes:
    """The hash of a part. Reading and hashing release the GIL."""
    whole, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    position, end = begin, begin + _PART_BYTES
    while position < end and (num_read := os.preadv(fd, [buffer[: end - position]], position)):
        whole.update(buffer[:num_read])
        position += num_read
    return whole.digest()


def digest_fields(fields: Iterable[bytes]) -> bytes:
    """The hash of a list of fields with their lengths, so that no two lists are the same bytes."""
    whole = hashlib.sha256()
    for field in fields:
        whole.update(len(field).to_bytes(8, "little"))
        whole.update(field)
    return whole.digest()
