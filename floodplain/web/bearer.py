"""Bearer secrets: read from a file that only this process's user or group can read, and found by their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from floodplain.core.errors import UserError
from floodplain.files.reading import FileContent, decode, read_file
from floodplain.web.address import is_loopback

MAX_SECRETS_BYTES = 2**24
T = TypeVar("T")


def read_secret_lines(path: Path, kind: str) -> list[tuple[int, list[str]]]:
    """(line number, words) of every line of a file of secrets that is neither blank nor a ``#`` comment.

    Its mode must be 0600 or stricter, or 0440 with a group of this process's, as Kubernetes mounts secrets
    (``fsGroup``). Raises UserError, which names it as ``kind``, if it is unreadable, others may use it, or a comment
    follows other words: one of those would count as the secret.
    """
    content = read_file(path, MAX_SECRETS_BYTES, f"the {kind}")
    text = decode(content.data, path, f"the {kind}")
    if not _is_private(content):
        told = f"others may use the {kind} {path} (mode {content.mode:04o}, group {content.gid})"
        raise UserError(f"{told}: run chmod 600 {path}, or chmod 440 if its group is one of this process's")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    found = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    for number, words in found:
        if any(word.startswith("#") for word in words):
            raise UserError(f"{path}, line {number}: a comment needs a line of its own, and no word begins with #")
    return found


def read_secret(path: Path, kind: str) -> str:
    """The last word of the first line (``ROLE NAME TOKEN`` works too). Raises UserError as above, or if it is empty."""
    lines = read_secret_lines(path, kind)
    if not lines:
        raise UserError(f"the {kind} {path} is empty: write the token into it")
    return lines[0][1][-1]


def _is_private(content: FileContent) -> bool:
    """Whether only the owner may use the file, or only the owner and a group of this process may read it."""
    is_ours = content.gid in (os.getegid(), *os.getgroups())
    return not content.mode & 0o077 or (is_ours and not content.mode & ~0o440)


class SecretRing(Generic[T]):
    """The secrets of a service, with their owners."""

    def __init__(self, owners: Mapping[str, T]) -> None:
        self._owners = {_digest(secret.encode()): owner for secret, owner in owners.items()}

    def client_of(self, authorization: bytes) -> T | None:
        """The owner of the secret in an ``Authorization`` header; None if it is unknown. The time reveals no secret."""
        scheme, _, presented = authorization.partition(b" ")
        return self._owners.get(_digest(presented.strip())) if scheme.lower() == b"bearer" else None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def check_exposure(host: str, ring: SecretRing[T] | None, flag: str) -> None:
    """Raise UserError, which names the flag of secrets, if there are none and ``host`` is not a loopback address."""
    if ring is None and not is_loopback(host):
        raise UserError(f"--host {host} lets other machines in: give {flag} FILE, or --host 127.0.0.1")
