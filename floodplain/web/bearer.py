"""Bearer secrets: read from a file that only this process's user or group can read, compared in constant time."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from floodplain.core.errors import UserError
from floodplain.files.reading import FileContent, decode, read_file

MAX_SECRETS_BYTES = 2**24
"""Of one file of secrets."""
T = TypeVar("T")


def read_secret_lines(path: Path, kind: str) -> list[tuple[int, list[str]]]:
    """(line number, words) of every line of a file of secrets that is neither blank nor a ``#`` comment.

    Args:
        path: Mode 0600 or stricter; or 0440 with a group of this process's, as Kubernetes mounts secrets (``fsGroup``).
        kind: What the file is to its owner, such as ``API key file``: errors call it that.

    Raises:
        UserError: The file is unreadable, or others may use it.
    """
    content = read_file(path, MAX_SECRETS_BYTES, f"the {kind}")
    text = decode(content.data, path, f"the {kind}")
    if not _is_private(content):
        told = f"others may use the {kind} {path} (mode {content.mode:04o}, group {content.gid})"
        raise UserError(f"{told}: run chmod 600 {path}, or chmod 440 if its group is one of this process's")
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, words) for number, words in lines if words and not words[0].startswith("#")]


def read_secret(path: Path, kind: str) -> str:
    """The last word of the first line of a file of secrets, so a line ``ROLE NAME TOKEN`` will do.

    Raises:
        UserError: As ``read_secret_lines``; or there is no line.
    """
    lines = read_secret_lines(path, kind)
    if not lines:
        raise UserError(f"the {kind} {path} is empty: write the token into it")
    return lines[0][1][-1]


def _is_private(content: FileContent) -> bool:
    """Whether the owner alone may use the file, or a group of this process's may read it and nothing writes it."""
    is_ours = content.gid in (os.getegid(), *os.getgroups())
    return not content.mode & 0o077 or (is_ours and not content.mode & ~0o440)


def find_bearer(authorization: bytes, owners: Mapping[bytes, T]) -> T | None:
    """The owner of the secret in an ``Authorization`` header; None if it has none. Equally long for every wrong secret.

    Args:
        authorization: The header's value; empty if there is none.
        owners: By secret.
    """
    scheme, _, presented = authorization.partition(b" ")
    found = None
    for secret, owner in owners.items():
        if hmac.compare_digest(secret, presented.strip()):
            found = owner
    return found if scheme.lower() == b"bearer" else None
