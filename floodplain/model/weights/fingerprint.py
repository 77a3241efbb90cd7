"""Fingerprints the content of a model, so that equal keys of KV blocks mean equal bytes in all processes and machines.

Files are hashed whole. A sample would miss typical changes of weights: an adapter merged into some matrices, one matrix
edited. docs/design/011-loading.md has the cost.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from floodplain import __version__
from floodplain.files.parsing import parsing
from floodplain.model.network.config import ModelConfig

_PART_BYTES = 2**24
"""Bytes that one thread hashes at a time. Part of the definition: a file's hash is the hash of its parts' hashes."""
_READ_BYTES = 2**20
_MAX_THREADS = 16


class HasContent(Protocol):
    """The part of a model that ``fingerprint_kv`` uses.

    Attributes:
        config: The model's configuration.
    """

    config: ModelConfig

    def digest_weights(self) -> bytes:
        """A digest that is equal exactly for equal weights."""
        ...


def fingerprint_kv(source: HasContent, device: str, dtype: str, block_tokens: int, layers: range | None = None) -> str:
    """A digest of everything that determines the bytes of a KV block, except its tokens.

    Names and folders are not part of it. The version of this package is, since it determines the results, and so is
    the kind of device: kernels round differently, and dummies draw other weights there.

    Args:
        source: The model.
        device: The torch device on which it runs; its index does not count.
        dtype: Dtype of parameters and KV.
        block_tokens: Tokens of a block.
        layers: The layers whose KV a block has; None: all.

    Raises:
        UserError: A file of weights cannot be read any more.
    """
    shape = source.config.shape
    config = replace(source.config, shape=replace(shape, name=""))
    layers = range(shape.num_layers) if layers is None else layers
    settings = f"{device.partition(':')[0]} {dtype} {block_tokens} {layers.start}-{layers.stop}"
    parts = (__version__.encode(), repr(config).encode(), source.digest_weights(), settings.encode())
    return _digest(parts).hex()


def digest_files(files: Sequence[Path]) -> bytes:
    """The hash of these files' bytes, in this order. Hashes of unchanged files are cached.

    Raises:
        UserError: A file cannot be read.
    """
    return _digest([_digest_unchanged(file) for file in files])


def _digest_unchanged(file: Path) -> bytes:
    with parsing(file):
        now = file.stat()
        return _digest_file(file, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))


@lru_cache(maxsize=256)
def _digest_file(file: Path, state: tuple[int, ...]) -> bytes:
    """The hash of the file; cached by ``state`` (device, inode, size, mtime) for all engines of the process."""
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with file.open("rb") as opened, ThreadPoolExecutor(num_threads) as threads:
        size = os.fstat(opened.fileno()).st_size
        begins = range(0, size, _PART_BYTES)
        return _digest(threads.map(lambda begin: _digest_part(opened.fileno(), begin), begins))


def _digest_part(fd: int, begin: int) -> bytes:
    """The hash of a part. Reading and hashing release the GIL."""
    whole, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    position, end = begin, begin + _PART_BYTES
    while position < end and (num_read := os.preadv(fd, [buffer[: end - position]], position)):
        whole.update(buffer[:num_read])
        position += num_read
    return whole.digest()


def _digest(fields: Iterable[bytes]) -> bytes:
    """The hash of a list of fields; lengths are included, so that no two lists are the same bytes."""
    whole = hashlib.sha256()
    for field in fields:
        whole.update(len(field).to_bytes(8, "little"))
        whole.update(field)
    return whole.digest()
