"""Reads files that users name: only regular ones, up to a bound, without blocking."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from floodplain.core.errors import UserError
from floodplain.core.sizes import format_size

_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FileContent:
    """The bytes of a file when it was read, its permission bits and its group."""

    data: bytes
    mode: int
    gid: int


def read_file(path: Path, max_bytes: int, kind: str = "") -> FileContent:
    """The bytes and the mode of a regular file of at most ``max_bytes``.

    A pipe or a device is refused: reading one may block, or never end. Raises UserError, which names the file by
    ``kind`` (such as ``the API key file``) and path, if it is missing, unreadable, too large or not a regular file.
    """
    named = _named(path, kind)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{named}: it is {_kind(mode)}, and a regular file is needed")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = _read_bounded(file, max_bytes)
            status = os.fstat(fd)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        raise UserError(f"{named}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > max_bytes:
        raise UserError(f"{named}: it is larger than {format_size(max_bytes)}, the most that is read here")
    return FileContent(data, stat.S_IMODE(status.st_mode), status.st_gid)


def read_text(path: Path, max_bytes: int, kind: str = "") -> str:
    """The text of such a file, in UTF-8 with or without a byte order mark. Raises UserError, also for other text."""
    return decode(read_file(path, max_bytes, kind).data, path, kind)


def decode(data: bytes, path: Path, kind: str = "") -> str:
    """``data`` of the file at ``path`` as text. Raises UserError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith(b"\x1f\x8b"):
            raise UserError(f"{_named(path, kind)}: it is compressed: unpack it with gunzip") from error
        raise UserError(f"{_named(path, kind)}: it is not UTF-8 text (byte {error.start})") from error


def is_file(path: Path) -> bool:
    """Whether a regular file is there; False also if the path cannot be looked up."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False also if the path cannot be looked up."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _named(path: Path, kind: str) -> str:
    return f"cannot read {kind} {path}" if kind else f"cannot read {path}"


def _read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    """At most one chunk more than ``max_bytes``. The stated size is unused: it may be wrong (as in /proc) or change."""
    data = bytearray()
    while len(data) <= max_bytes and (chunk := file.read(_CHUNK_BYTES)):
        data += chunk
    return bytes(data)


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"


def user_folder(variable: str, below_home: str) -> Path | None:
    """The absolute folder that a variable (``XDG_CACHE_HOME``) names, else one below home; None without both."""
    named = Path(os.environ.get(variable, ""))
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / below_home if home.is_absolute() else None
