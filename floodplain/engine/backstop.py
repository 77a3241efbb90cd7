"""The backstop: a file from which a dropped layer is filled again if no peer can send it.

Instances of a machine that serve one model share the file. It holds the buffers as they are in memory, so filling only
reads: no name lookups, no conversion. The digests are those of the layers as loaded, never the file's.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import format_size
from floodplain.engine.layer_file import LayerFile, compute_layer_digest, describe_layers, locked
from floodplain.files.home import user_folder
from floodplain.model.network.parameters import ParameterBuffer

logger = logging.getLogger(__name__)


class BackstopDamaged(UserError):
    """A layer cannot be filled from the file: it is unreadable, or its bytes are not those that were loaded."""


class Backstop:
    """The open file; deleting or replacing it by name does not affect this instance. Callable on any thread.

    Args:
        fd: The open file; closed by ``close``.
        path: Path at which it was opened.
        layers: Expected contents.
    """

    def __init__(self, fd: int, path: Path, layers: LayerFile) -> None:
        self.path = path
        self._fd = fd
        self._layers = layers
        self._damage: str | None = None

    def check(self) -> str | None:
        """The reason in one line why no layer should be dropped; None if the file is the expected one.

        Compares size and header, in a fraction of a millisecond. Only ``fill`` finds damaged layers.
        """
        if self._damage is not None:
            return self._damage
        try:
            fault = self._layers.find_fault(self._fd)
        except OSError as error:
            fault = f"it cannot be read: {error.strerror}"
        return None if fault is None else f"backstop {self.path}: {fault}"

    def fill(self, layer: int, buffer: ParameterBuffer) -> None:
        """Read a layer's parameters into its mapped buffer, check their digest, and set ``is_filled``.

        Args:
            layer: Index in the buffers of ``open_backstop``.
            buffer: Of this layer.

        Raises:
            BackstopDamaged: The file is truncated, unreadable or damaged. The buffer is not filled, ``check`` refuses
                from now on, and the file is deleted, so that the next start writes a new one.
            InvariantError: The buffer has no memory, or is another layer's.
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
        """Check the digest of parameters that a peer sent; set ``is_filled`` and return whether it matches.

        Raises:
            InvariantError: The buffer has no memory, or is another layer's.
        """
        self._expect(layer, buffer)
        buffer.is_filled = compute_layer_digest(buffer.tensor) == self._layers.digests[layer]
        return buffer.is_filled

    def digest_of(self, layer: int) -> bytes:
        """SHA-256 of a layer's buffer as loaded: 32 bytes, equal in all instances with the same fingerprint."""
        return self._layers.digests[layer]

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
    """The default folder for backstops, in the user's cache.

    Raises:
        UserError: There is no cache folder.
    """
    root = user_folder("XDG_CACHE_HOME", ".cache")
    if root is None:
        raise UserError("no folder for the backstop of the model's layers: set XDG_CACHE_HOME")
    return root / "floodplain" / "backstops"


def open_backstop(folder: Path, fingerprint: str, buffers: Sequence[ParameterBuffer]) -> Backstop:
    """Open the machine's backstop of a model; write it if it is missing or not the expected one.

    Processes that start at the same time wait until the first one has written it. Files of other models, number formats
    and versions in ``folder`` are not touched: the user deletes them.

    Args:
        folder: On a local disk; made if it is missing.
        fingerprint: Of the model, its number format and the kind of device.
        buffers: All layers of the model, filled, in order; their digests are computed here, once.

    Raises:
        UserError: The folder is not writable, or the disk is full.
    """
    if not all(buffer.is_filled for buffer in buffers):
        raise InvariantError("a backstop is opened before all parameters are loaded")
    tensors = [buffer.tensor for buffer in buffers]
    layers = describe_layers(fingerprint, tensors)
    path = folder / f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:32]}.layers"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path):
            fd = _open_expected(path, layers)
            if fd is None:
                layers.write(path, tensors)
                logger.info("wrote the backstop %s, %s", path, format_size(layers.num_bytes))
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"the backstop {path} cannot be written ({error.strerror}): it needs a writable folder with "
            f"{layers.num_bytes} bytes free"
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
