"""Compiled libraries between runs: in a folder that only this user can change, each with a digest of its bytes.

A library is executed, so nothing is taken that another user may have put there, and nothing that is not whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from floodplain.files.home import user_folder

logger = logging.getLogger(__name__)

_MAGIC = b"floodplain library 1"
_DIGEST_BYTES = 32
_MAX_BYTES = 2**26
_OTHERS_WRITE = 0o022


class LibraryCache:
    """A folder of libraries, made if missing and held open: what happens to its path afterwards does not matter.

    Raises ``OSError`` if it cannot be made or opened, is a link, or others may change it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _is_ours(os.fstat(self._fd)):
            os.close(self._fd)
            raise PermissionError(f"{folder} belongs to another user, or others may write there")

    @classmethod
    def of_user(cls) -> Self | None:
        """The cache in the user's cache folder or the temporary folder; None, with a line in the log, if in neither."""
        refusals = []
        for folder in _candidates():
            try:
                return cls(folder)
            except OSError as error:
                refusals.append(str(error))
        logger.warning("compiled kernels are not kept (set XDG_CACHE_HOME to a folder): %s", "; ".join(refusals))
        return None

    def load(self, name: str) -> bytes | None:
        """The library stored as ``name``; None if it is missing, cut, changed, or not this user's alone."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not (stat.S_ISREG(info.st_mode) and _is_ours(info) and info.st_size <= _MAX_BYTES):
                return None
            content = file.read()
        library, seal = content[: -len(_MAGIC) - _DIGEST_BYTES], content[-len(_MAGIC) - _DIGEST_BYTES :]
        return library if seal == _seal(library) else None

    def store(self, name: str, library: bytes) -> None:
        """Keep ``library`` as ``name``, whole or not at all; replaces what is there. Raises ``OSError``."""
        scratch = f".{name}.{secrets.token_hex(8)}"
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(library + _seal(library))
                file.flush()
                os.fsync(fd)
            os.replace(scratch, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            os.unlink(scratch, dir_fd=self._fd)
            raise

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)


def _candidates() -> Iterator[Path]:
    root = user_folder("XDG_CACHE_HOME", ".cache")
    if root is not None:
        yield root / "floodplain"
    yield Path(tempfile.gettempdir()) / f"floodplain-{os.geteuid()}"


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE


def _seal(library: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(library, digest_size=_DIGEST_BYTES).digest()
