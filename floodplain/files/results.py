"""Where results go: checked before the work; a failure after it is one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from floodplain.core.errors import UserError, WriteFailed


def check_writable(path: Path) -> None:
    """Make the folder of a result file, and make sure that the file can be opened for writing.

    A link is followed, and what it leads to is left as it was. A pipe that no process reads is refused, not waited for.

    Raises:
        UserError: It cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        existed = os.path.lexists(target)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
        if not existed:
            target.unlink()
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        raise UserError(f"--out {path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def writing(name: object) -> Iterator[None]:
    """While the context is open, an error of the system means that ``name`` cannot be written.

    Raises:
        WriteFailed: There was one.
    """
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"{name} cannot be written: {error.strerror or error}") from error


def open_standard_streams() -> None:
    """Lead standard streams that are closed to ``/dev/null``: the next file that is opened would get their number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
