"""A file with the raw bytes of a model's layers, which is used only if it is exactly the expected one.

Its header has the model's fingerprint, and each layer's size and digest. A reader knows all of these from its own
memory: it builds the expected header and compares bytes, so nothing in the file is parsed or trusted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_MAGIC = b"floodplain layers 1\n"
_ALIGN_BYTES = 4096
_CHUNK_BYTES = 2**22
"""Bytes read and hashed at a time: few enough to be hashed from the processor's cache."""
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class LayerFile:
    """The expected contents of a file of layers.

    Attributes:
        fingerprint: Of the model and its number format.
        sizes: Bytes of each layer.
        digests: SHA-256 of each layer, 32 bytes.
    """

    fingerprint: str
    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]

    @property
    def header(self) -> bytes:
        """The first bytes of the file: whole pages."""
        layers = [[size, digest.hex()] for size, digest in zip(self.sizes, self.digests, strict=True)]
        content = _MAGIC + json.dumps({"fingerprint": self.fingerprint, "layers": layers}).encode()
        return content.ljust(_aligned(len(content)), b"\n")

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.find_offset(len(self.sizes))

    def find_offset(self, layer: int) -> int:
        """The offset of a layer in bytes."""
        return len(self.header) + sum(_aligned(size) for size in self.sizes[:layer])

    def find_fault(self, fd: int) -> str | None:
        """Why an open file is not the expected one, by size and header only; None if they match.

        Raises:
            OSError: It cannot be read.
        """
        found, header = os.fstat(fd).st_size, self.header
        if found != self.num_bytes:
            return f"it has {found} bytes, not {self.num_bytes}"
        if os.pread(fd, len(header), 0) != header:
            return "its header is another model's, or damaged"
        return None

    def write(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        """Write the file beside ``path``, to disk, and then rename it; the caller holds ``locked``.

        Args:
            path: Of the file.
            tensors: uint8 of each layer.

        Raises:
            OSError: The disk is full, or the folder is not writable; a file at ``path`` is unchanged.
        """
        part = path.with_name(path.name + ".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.num_bytes)
            _write_all(fd, 0, memoryview(self.header))
            for layer, tensor in enumerate(tensors):
                offset = self.find_offset(layer)
                for chunk in _cut(tensor):
                    _write_all(fd, offset, chunk.cpu().numpy().data)
                    offset += len(chunk)
            os.fsync(fd)
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        finally:
            os.close(fd)

    def read_layer(self, fd: int, layer: int, target: torch.Tensor) -> bool:
        """Read a layer into uint8 memory of its size; return whether it is whole and has the expected digest.

        Raises:
            OSError: It cannot be read.
        """
        offset, whole = self.find_offset(layer), hashlib.sha256()
        for chunk in _cut(target):
            staged = chunk if chunk.is_cpu else torch.empty(len(chunk), dtype=torch.uint8)
            view = staged.numpy().data
            if not _read_all(fd, offset, view):
                return False
            whole.update(view)
            if staged is not chunk:
                chunk.copy_(staged)
            offset += len(chunk)
        return whole.digest() == self.digests[layer]


def describe_layers(fingerprint: str, tensors: Sequence[torch.Tensor]) -> LayerFile:
    """The expected file for these layers (uint8) in memory; computes their digests."""
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        digests = tuple(threads.map(compute_layer_digest, tensors))
    return LayerFile(fingerprint, tuple(len(tensor) for tensor in tensors), digests)


def compute_layer_digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a layer's bytes (uint8), on any device."""
    whole = hashlib.sha256()
    for chunk in _cut(tensor):
        whole.update(chunk.cpu().numpy().data)
    return whole.digest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the machine-wide lock for writing ``path``; it is released if the process exits.

    Raises:
        OSError: The lock file beside ``path`` cannot be made.
    """
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _cut(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor, _CHUNK_BYTES) if len(tensor) else ()


def _read_all(fd: int, offset: int, target: memoryview) -> bool:
    """Fill ``target``; False if the file ends before."""
    position = 0
    while position < len(target):
        num_read = os.preadv(fd, [target[position:]], offset + position)
        if not num_read:
            return False
        position += num_read
    return True


def _write_all(fd: int, offset: int, content: memoryview) -> None:
    position = 0
    while position < len(content):
        position += os.pwrite(fd, content[position:], offset + position)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
