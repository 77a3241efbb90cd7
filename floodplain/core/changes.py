"""What changed since a reader last looked: reading changes nothing, so any number of readers can do so."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MOST_CHANGES = 16_384
"""Changes that a log keeps when it is trimmed."""


class ChangeLog(Generic[T]):
    """Names of what changed, in order; the number of changes so far is the log's version.

    ``add`` and ``update`` are the list's own ``append`` and ``extend``, since a step adds dozens of names.
    """

    def __init__(self) -> None:
        self._names: list[T] = []
        self._num_dropped = 0
        self.add = self._names.append
        self.update = self._names.extend

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._num_dropped + len(self._names)

    def trim(self) -> None:
        """Drop the oldest changes beyond ``MOST_CHANGES``; readers that missed these see all. Call it often."""
        excess = len(self._names) - MOST_CHANGES
        if excess > 0:
            self._num_dropped += excess
            del self._names[:excess]

    def since(self, version: int) -> set[T] | None:
        """Names that changed after ``version``; None if some of these changes were dropped."""
        first = version - self._num_dropped
        return None if first < 0 else set(self._names[first:])


class ChangeReader(Generic[T]):
    """The version of a log up to which one reader has read."""

    def __init__(self, log: ChangeLog[T]) -> None:
        self._log = log
        self._version = 0

    def take(self, known: Iterable[T]) -> set[T]:
        """Names that changed since the last call; all ``known`` ones if the log has dropped some changes."""
        before, self._version = self._version, self._log.version
        if before == self._version:
            return set()
        changed = self._log.since(before)
        return set(known) if changed is None else changed
