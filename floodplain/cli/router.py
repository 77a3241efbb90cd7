"""Requests of the verbs ``cluster`` and ``instances`` to a router, and its answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.parsing import parsing
from floodplain.observe.terminal import complain
from floodplain.server.auth import read_keys
from floodplain.web.address import check_base_url
from floodplain.web.client import USUAL, AnswerLimits, NoAnswer, NoServer, ask_now

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
KEY_HELP = "key file of the router, of which an admin's key is sent (default: the key in OPENAI_API_KEY, if any)"
CHANGE = AnswerLimits(total_s=30.0)
"""Limits of the answer to a change of the cluster. A drop is answered once all instances have confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """The flags of both verbs. Raises UserError if ``base_url`` is no address."""

    base_url: str = flag("http://127.0.0.1:8000", "of the router", metavar="URL")
    api_key_file: Path | None = flag(None, KEY_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        check_base_url(self.base_url)


class RouterRefuses(Exception):
    """A router answered with another status than 200. The message is the reason, in one line."""


def key_to_send(path: Path | None) -> str | None:
    """The first admin's key of a key file, else its first one; without a file, the one in ``OPENAI_API_KEY``."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    clients = read_keys(path)
    return next((key for key, client in clients.items() if client.is_admin), next(iter(clients)))


def ask_router(
    base_url: str, path: str, body: Mapping[str, Any] | None = None, *, api_key: str | None = None
) -> dict[str, Any]:
    """The JSON object in a router's answer; NoAnswer without one, RouterRefuses if the status is not 200.

    UserError if the answer is not a JSON object.
    """
    answer = ask_now(base_url, path, body, USUAL if body is None else CHANGE, api_key=api_key)
    if answer.status == 404:
        raise RouterRefuses(
            f"{base_url} has no {path}: give the --base-url of a server that runs with --instances, without a path"
        )
    if answer.status != 200:
        raise RouterRefuses(answer.reason())
    content = answer.json()
    if not isinstance(content, dict):
        raise UserError("its answer is no JSON object")
    return content


def told(base_url: str, tell: Callable[[], T]) -> T | None:
    """The result of ``tell``; None, after a line on standard error, if the router's answers do not allow one."""
    try:
        with parsing("its answer", "is not that of a router"):
            try:
                return tell()
            except (NoAnswer, RouterRefuses) as error:
                raise UserError(str(error)) from error
    except UserError as error:
        if isinstance(error.__cause__, NoServer):
            complain(f"{error}: start one, or give its address with --base-url")
        else:
            names_it = isinstance(error.__cause__, RouterRefuses)
            complain(str(error) if names_it else f"no router answers at {base_url}: {error}")
    return None
