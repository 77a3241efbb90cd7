"""The backstop: a file from which a dropped layer is filled again if no peer can send it.

Instances of a machine that serve one model share the file. It holds the layers' buffers as they are in memory, behind a
header with the model's fingerprint and each layer's size and digest, which a reader compares with its own memory's.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import show_size
from floodplain.files.cores import count_cores
from floodplain.files.reading import user_folder
from floodplain.model.network.parameters import ParameterBuffer

logger = logging.getLogger(__name__)

_MAGIC = b"floodplain layers 1\n"
_ALIGN_BYTES = 4096
_CHUNK_BYTES = 2**22
"""Bytes read and hashed at a time: few enough to be hashed from the processor's cache."""
_MAX_THREADS = 4


class BackstopDamaged(UserError):
    """A layer cannot be filled from the file: it is unreadable, or its bytes are not those that were loaded."""


class Backstop:
    """The open file; deleting or replacing it by name does not affect this instance. Callable on any thread."""

    def __init__(self, fd: int, path: Path, layers: LayerFile) -> None:
        self.path = path
        self._fd = fd
        self._layers = layers
        self._damage: str | None = None

    def check(self) -> str | None:
        """Why no layer should be dropped, by the file's size and header, in one line; None if they are right."""
        if self._damage is not None:
            return self._damage
        try:
            fault = self._layers.find_fault(self._fd)
        except OSError as error:
            fault = f"it cannot be read: {error.strerror}"
        return None if fault is None else f"backstop {self.path}: {fault}"

    def fill(self, layer: int, buffer: ParameterBuffer) -> None:
        """Read a layer's parameters into its mapped buffer, check their digest, and set ``is_filled``.

        Raises BackstopDamaged if the file is unreadable or damaged: ``check`` refuses from now on, and the file is
        deleted, so that the next start writes a new one.
        """
        self._expect(layer, buffer)
        try:
            is_whole = self._layers.read_layer(self._fd, layer, buffer.tensor)
            reason = "its bytes are not those that were loaded"
        except OSError as error:
            is_whole, reason = False, f"it cannot be read: {error.strerror}"
        if not is_whole:
            self._damage = f"backstop {self.path}: layer {layer} is damaged, {reason}; restart to write a new file"
            self._delete()
            raise BackstopDamaged(self._damage)
        buffer.is_filled = True

    def accept(self, layer: int, buffer: ParameterBuffer) -> bool:
        """Set ``is_filled``, and return it: whether parameters that a peer sent have the expected digest."""
        self._expect(layer, buffer)
        buffer.is_filled = _compute_layer_digest(buffer.tensor) == self._layers.digests[layer]
        return buffer.is_filled

    def close(self) -> None:
        """Close the file, which stays on disk for the next start. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _expect(self, layer: int, buffer: ParameterBuffer) -> None:
        if not buffer.is_mapped:
            raise InvariantError(f"parameters of layer {layer} are read into a buffer without memory")
        if len(buffer.tensor) != self._layers.sizes[layer]:
            raise InvariantError(f"layer {layer} has {self._layers.sizes[layer]} bytes, not {len(buffer.tensor)}")
        buffer.is_filled = False

    def _delete(self) -> None:
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self._fd)):
                self.path.unlink()


def default_backstop_folder() -> Path:
    """The folder for backstops in the user's cache. Raises UserError if there is no cache folder."""
    root = user_folder("XDG_CACHE_HOME", ".cache")
    if root is None:
        raise UserError("no folder for the backstop of the model's layers: set XDG_CACHE_HOME")
    return root / "floodplain" / "backstops"


def open_backstop(folder: Path, fingerprint: str, buffers: Sequence[ParameterBuffer]) -> Backstop:
    """Open the machine's backstop of a model in ``folder``; write it if it is missing or not the expected one.

    Processes that start at the same time wait until the first one has written it. Files of other models stay.
    ``fingerprint`` is of the model, its number format and the kind of device; ``buffers`` are all its layers, filled.
    UserError if the folder is not writable or the disk is full.
    """
    if not all(buffer.is_filled for buffer in buffers):
        raise InvariantError("a backstop is opened before all parameters are loaded")
    tensors = [buffer.tensor for buffer in buffers]
    layers = _describe_layers(fingerprint, tensors)
    path = folder / f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:32]}.layers"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path):
            fd = _open_expected(path, layers)
            if fd is None:
                layers.write(path, tensors)
                logger.info("wrote the backstop %s, %s", path, show_size(layers.num_bytes))
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"the backstop {path} cannot be written ({error.strerror}): it needs a writable folder with "
            f"{show_size(layers.num_bytes)} free"
        ) from error
    return Backstop(fd, path, layers)


def _open_expected(path: Path, layers: LayerFile) -> int | None:
    """Open the file; None if it is missing or not the expected one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if layers.find_fault(fd) is None:
            return fd
    except OSError as error:
        logger.warning("the backstop %s is written anew: %s", path, error.strerror)
    os.close(fd)
    return None


@dataclass(frozen=True, slots=True)
class LayerFile:
    """The expected contents of a file of layers: bytes and SHA-256 (32 bytes) of each layer."""

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
        """Why an open file is not the expected one, by size and header; None if they match. Raises OSError."""
        found, header = os.fstat(fd).st_size, self.header
        if found != self.num_bytes:
            return f"it has {found} bytes, not {self.num_bytes}"
        if os.pread(fd, len(header), 0) != header:
            return "its header is another model's, or damaged"
        return None

    def write(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        """Write the layers (uint8) beside ``path``, to disk, and then rename the file; the caller holds ``_locked``.

        Raises OSError if the disk is full or the folder is not writable; a file at ``path`` is then unchanged.
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
        """Read a layer into uint8 memory of its size; return whether its digest is the expected one. Raises OSError."""
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


def _describe_layers(fingerprint: str, tensors: Sequence[torch.Tensor]) -> LayerFile:
    with ThreadPoolExecutor(min(_MAX_THREADS, count_cores())) as threads:
        digests = tuple(threads.map(_compute_layer_digest, tensors))
    return LayerFile(fingerprint, tuple(len(tensor) for tensor in tensors), digests)


def _compute_layer_digest(tensor: torch.Tensor) -> bytes:
    whole = hashlib.sha256()
    for chunk in _cut(tensor):
        whole.update(chunk.cpu().numpy().data)
    return whole.digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the machine-wide lock for writing ``path``; it is released if the process exits."""
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
