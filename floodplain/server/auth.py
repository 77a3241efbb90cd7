"""API keys: their clients, and what they allow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from floodplain.core.errors import UserError
from floodplain.core.request import NO_GOALS, Goals
from floodplain.web.bearer import SecretRing, read_secret_lines

KEY_LINE = "KEY, or [admin] NAME KEY [PRIORITY] [ttft=MS] [tpot=MS]"
ADMIN = "admin"
LEAST_ADMIN_LETTERS = 8
"""Least length of an admin's key. A mistyped limit of a client named ``admin`` is shorter, and so refused."""
_PRIORITY, _GOAL = r"-?\d{1,3}", r"(?:ttft|tpot)=[1-9]\d{0,8}"
_LIMIT = re.compile(r"-?\d+|\w*=.*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, as its API key identifies it.

    Attributes:
        name: Fairness may be counted by it.
        best_priority: The lowest ``priority`` that its requests may set; lower is sooner.
        shares_prefixes: Whether its requests may reuse prefixes that other clients computed.
        best_goals: The tightest goals that its requests may set; a goal that is None has no limit.
    """

    name: str = ""
    best_priority: int = 0
    shares_prefixes: bool = False
    best_goals: Goals = NO_GOALS
    is_admin: bool = False

    def priority(self, asked: int | None) -> int:
        """The priority of a request that sets ``asked``, or none. Raises UserError if it is below ``best_priority``."""
        if asked is not None and asked < self.best_priority:
            raise UserError(f"priority {asked} is beyond this API key's ceiling: send {self.best_priority} or more")
        return max(self.best_priority, 0) if asked is None else asked

    def goals(self, asked: Goals) -> Goals:
        """``asked``. Raises UserError if one of them is tighter than in ``best_goals``."""
        best = self.best_goals
        for name, asked_s, best_s in (("ttft", asked.ttft_s, best.ttft_s), ("tpot", asked.tpot_s, best.tpot_s)):
            if asked_s is not None and best_s is not None and asked_s < best_s:
                limit = f"{name}_goal_ms {1e3 * asked_s:g} is below this API key's floor"
                raise UserError(f"{limit}: send {1e3 * best_s:g} or more")
        return asked

    def cache_salt(self, asked: str | None) -> str:
        """The cache salt of a request that sets ``asked``; differs between clients unless they share prefixes.

        Response time reveals whether a prefix was cached.
        """
        if self.shares_prefixes or not self.name:
            return asked or ""
        return f"{self.name} {asked or ''}"  # a name holds no space


class KeyRing(SecretRing[Client]):
    """The API keys of a server, and their clients; several keys may have one client."""

    @classmethod
    def from_file(cls, path: Path, *, share_prefixes: bool = False) -> Self:
        """Read a key file; ``share_prefixes`` lets requests reuse other clients' prefixes. Raises as ``read_keys``."""
        clients = read_keys(path)
        return cls({key: replace(client, shares_prefixes=share_prefixes) for key, client in clients.items()})


def read_keys(path: Path) -> dict[str, Client]:
    """Keys and their clients, from a file with one key a line (``KEY_LINE``).

    A bare key's client is named ``key-N`` after its line. PRIORITY is the lowest that its requests may set, 0 by
    default; ``ttft`` and ``tpot`` are the tightest goals, in milliseconds. Raises UserError if the file is unreadable,
    others may read it, or a line is malformed.
    """
    clients: dict[str, Client] = {}
    for number, words in read_secret_lines(path, "API key file"):
        key, client = _parse_line(words, number, path)
        if key in clients:
            raise UserError(f"{path}, line {number}: this KEY stands there twice")
        clients[key] = client
    if not clients:
        raise UserError(f"the API key file {path} holds no key: write one a line, {KEY_LINE}")
    return clients


def _parse_line(words: list[str], number: int, path: Path) -> tuple[str, Client]:
    if len(words) == 1:
        return words[0], Client(f"key-{number}")
    is_admin = len(words) > 2 and words[0] == ADMIN and not _LIMIT.fullmatch(words[2])
    if is_admin:
        words = words[1:]
        if len(words[1]) < LEAST_ADMIN_LETTERS:
            raise UserError(f"{path}, line {number}: the KEY of an admin needs {LEAST_ADMIN_LETTERS} letters or more")
    if re.fullmatch(r"key-\d+", words[0], re.ASCII):
        raise UserError(f"{path}, line {number}: the name {words[0]} is for keys without a name: choose another NAME")
    found = re.fullmatch(rf"({_PRIORITY}\b)?((?: ?{_GOAL})*)", " ".join(words[2:]), re.ASCII)
    limits = dict(word.split("=") for word in found[2].split()) if found else {}
    if found is None or len(limits) < len(found[2].split()):
        raise UserError(f"{path}, line {number}: {_problem(words, is_admin)}write {KEY_LINE}, with whole numbers")
    best = {f"{name}_s": int(limit_ms) / 1e3 for name, limit_ms in limits.items()}
    return words[1], Client(words[0], int(found[1] or 0), best_goals=Goals(**best), is_admin=is_admin)


def _problem(words: Sequence[str], is_admin: bool) -> str:
    """Which word is wrong, by its number: it may be a misplaced key, which must not be in a log."""
    if words[0] == f"[{ADMIN}]":
        return f"write {ADMIN} without brackets; "
    shapes = [f"{_PRIORITY}|{_GOAL}"] + [_GOAL] * len(words)
    for place, (word, shape) in enumerate(zip(words[2:], shapes, strict=False), 3 + is_admin):
        if not re.fullmatch(shape, word, re.ASCII):
            return f"word {place} is no limit; "
    return ""
