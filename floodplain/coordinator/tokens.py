"""Tokens with roles: which messages a caller may send, for which members."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from floodplain.core.errors import UserError
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.web.bearer import SecretRing, read_secret_lines


class Role(Enum):
    """The role of a token's holder."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    ADMIN = "admin"


_LIVES: frozenset[type[Message]] = frozenset({Join, Leave, Heartbeat})
MAY_SAY: Mapping[Role, frozenset[type[Message]]] = {
    Role.PRODUCER: _LIVES | {Offer, Recall, Observe},
    Role.CONSUMER: _LIVES | {Request, Report},
    Role.ADMIN: _LIVES | {Offer, Recall, Observe, Request, Report},
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, by its token.

    ``grants`` has (role, pattern) of each line with its token: the pattern is a member's name, or covers several
    (``gpu-*``). No pattern for consumers covers ``lenders``: names that lines of other tokens give to producers.
    """

    grants: tuple[tuple[Role, str], ...]
    lenders: frozenset[str] = frozenset()

    @property
    def is_admin(self) -> bool:
        """Whether it may see everything, and forget a device."""
        return any(role is Role.ADMIN for role, _ in self.grants)

    def may_say(self, message: Message) -> bool:
        """Whether one of its roles may send such messages for this message's member."""
        return any(
            type(message) in MAY_SAY[role] and self._covers(role, pattern, message.name)
            for role, pattern in self.grants
        )

    def may_lend(self, name: str, /) -> bool:
        """Whether it may offer bytes of that member's device, and so send messages for its life if it lends."""
        return self.is_admin or self.is_producer(name)

    def is_producer(self, name: str, /) -> bool:
        """Whether a producer's line covers that member."""
        return any(role is Role.PRODUCER and self._covers(role, pattern, name) for role, pattern in self.grants)

    def _covers(self, role: Role, pattern: str, name: str) -> bool:
        is_kept = role is Role.CONSUMER and pattern != name and name in self.lenders
        return role is Role.ADMIN or (fnmatch.fnmatchcase(name, pattern) and not is_kept)


UNRESTRICTED = Caller(((Role.ADMIN, "*"),))
"""The caller if tokens are not checked: on this machine alone."""


class TokenRing(SecretRing[Caller]):
    """The tokens of a coordinator, with their callers."""

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a token file: lines ``TOKEN`` (an admin's) or ``ROLE NAME TOKEN``; a token may be in several lines.

        UserError if the file is unreadable, others may read it, or a line is malformed.
        """
        grants: dict[str, list[tuple[Role, str]]] = {}
        for number, words in read_secret_lines(path, "token file"):
            role, name, token = _parse_line(words, number, path)
            grants.setdefault(token, []).append((role, name))
        if not grants:
            raise UserError(f"the token file {path} holds no token: write one a line, TOKEN or ROLE NAME TOKEN")
        lenders = {token: {name for role, name in some if role is Role.PRODUCER} for token, some in grants.items()}
        everyones = frozenset[str]().union(*lenders.values())
        return cls({token: Caller(tuple(some), everyones - lenders[token]) for token, some in grants.items()})


def _parse_line(words: list[str], number: int, path: Path) -> tuple[Role, str, str]:
    roles = {role.value: role for role in Role}
    if len(words) == 1 and words[0] not in roles:
        return Role.ADMIN, "*", words[0]
    if len(words) != 3 or words[0] not in roles:
        raise UserError(f"{path}, line {number}: write TOKEN, or ROLE NAME TOKEN with a ROLE of {', '.join(roles)}")
    return roles[words[0]], words[1], words[2]
