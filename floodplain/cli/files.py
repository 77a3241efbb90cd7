"""Where results go: refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from floodplain.core.errors import UserError


def check_writable(path: Path) -> None:
    """Make the folder of a result file, and make sure that the file can be written.

    Raises:
        UserError: It cannot.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from None
    if not existed:
        path.unlink()
