"""Requests whose KV is copied between members of a group: the copies that are still due. No I/O, no clock.

A request's blocks are reused only when every member that copies into them has answered, whether or not the
request is still live: a late write would corrupt another request's KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of a request's copies."""

    ADOPT = "adopt"
    LOST = "lost"
    ABORTED = "aborted"


@dataclass(slots=True)
class _Fetch:
    epochs: set[int]
    to: int
    has_failed: bool = False
    is_wanted: bool = True


class Fetches:
    """Progress of the copies of several requests.

    Args:
        sources: For each request, oldest first: epochs of the members that copy its KV, and that of the member that
            resumes it.
    """

    def __init__(self, sources: Mapping[int, tuple[set[int], int]]) -> None:
        self._fetches = {request: _Fetch(set(epochs), to) for request, (epochs, to) in sources.items()}

    def __len__(self) -> int:
        """The number of requests with copies due."""
        return len(self._fetches)

    @property
    def requests(self) -> tuple[int, ...]:
        """The live requests with copies due, oldest first."""
        return tuple(request for request, fetch in self._fetches.items() if fetch.is_wanted)

    def pending_of(self, epoch: int) -> tuple[int, ...]:
        """Requests that this member still has to copy, oldest first."""
        return tuple(request for request, fetch in self._fetches.items() if epoch in fetch.epochs)

    def abort(self, request: int) -> bool:
        """Mark a request as aborted; its copies under way still finish. True if it had copies due."""
        fetch = self._fetches.get(request)
        if fetch is not None:
            fetch.is_wanted = False
        return fetch is not None

    def answer(self, request: int, epoch: int, *, is_ok: bool) -> tuple[Outcome | None, int] | None:
        """A member has copied a request's KV, or failed to.

        Returns:
            The outcome of the request (None: other members have still to answer), and the epoch of the member that
            resumes it. None if this answer was not awaited.
        """
        fetch = self._fetches.get(request)
        if fetch is None or epoch not in fetch.epochs:
            return None
        fetch.epochs.remove(epoch)
        fetch.has_failed = fetch.has_failed or not is_ok
        if fetch.epochs:
            return None, fetch.to
        del self._fetches[request]
        if not fetch.is_wanted:
            return Outcome.ABORTED, fetch.to
        return (Outcome.LOST if fetch.has_failed else Outcome.ADOPT), fetch.to
