"""API keys: read from a file that only its owner can read, compared in constant time."""

from __future__ import annotations

import hmac
import ipaddress
import stat
from pathlib import Path
from typing import Self

from floodplain.core.errors import UserError


class KeyRing:
    """The keys that may use the server, and whose they are.

    Args:
        names: Key to client's name; several keys may have one name.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = {key.encode(): name for key, name in names.items()}

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            UserError: As ``read_keys``.
        """
        return cls(read_keys(path))

    def client_of(self, authorization: bytes) -> str | None:
        """Whose key an ``Authorization`` header carries; None if nobody's. Takes as long for every wrong key."""
        scheme, _, presented = authorization.partition(b" ")
        found = None
        for key, name in self._names.items():
            if hmac.compare_digest(key, presented.strip()):
                found = name
        return found if scheme.lower() == b"bearer" else None


def read_keys(path: Path) -> dict[str, str]:
    """Keys and their clients' names, from a file with a line ``KEY`` or ``NAME KEY`` for each; ``#`` starts a comment.

    A bare key's client is named ``key-N`` after its line.

    Raises:
        UserError: The file is unreadable, others may read it, or a line is malformed.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API key file {path}: {error}") from error
    if mode & 0o077:
        raise UserError(f"others may use the API key file {path} (mode {mode:04o}): run chmod 600 {path}")
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or words[-1] in names:
            raise UserError(f"{path}, line {number}: write KEY or NAME KEY, each key once")
        names[words[-1]] = words[0] if len(words) == 2 else f"key-{number}"
    if not names:
        raise UserError(f"the API key file {path} holds no key: write one a line, KEY or NAME KEY")
    return names


def check_exposure(host: str, keys: KeyRing | None) -> None:
    """Refuse to serve other machines without keys.

    Raises:
        UserError: ``host`` is not this machine alone, and there are no keys.
    """
    if keys is not None or host == "localhost":
        return
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise UserError(f"--host {host} lets other machines in: give --api-key-file FILE, or --host 127.0.0.1")
