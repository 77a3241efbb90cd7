"""Finds, among producers with equally fast links, the best one that takes a given consumer.

A consumer on another server ranks all of them alike, and they rank it alike. So the first one that would take it is
found in logarithmic time, without proposals to those that would refuse it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Rank = tuple[int, int, bool, str]
"""A consumer's rank for a producer: the least is the best."""
FREE: tuple[int] = (1,)
"""Above every rank, whose first number is negative: a free producer takes any consumer."""


class Offers:
    """A tree over the producers, in which each node has the worst rank that is held below it.

    Args:
        producers: Bytes and device of each.
    """

    def __init__(self, producers: Sequence[tuple[int, str]]) -> None:
        self._order = sorted(producers)
        self._place = {device: place for place, (_, device) in enumerate(self._order)}
        self._size = 1 << (len(self._order) - 1).bit_length()
        self._worst: list[Rank | tuple[int, ...]] = [(-1 << 63,)] * (2 * self._size)
        self._worst[self._size : self._size + len(self._order)] = [FREE] * len(self._order)
        for node in range(self._size - 1, 0, -1):
            self._worst[node] = max(self._worst[2 * node : 2 * node + 2])

    def hold(self, device: str, rank: Rank) -> None:
        """Record the rank of the consumer that a producer now holds."""
        node = self._size + self._place[device]
        self._worst[node] = rank
        while node := node // 2:
            self._worst[node] = max(self._worst[2 * node], self._worst[2 * node + 1])

    def best_for(self, num_bytes: int, rank: Rank) -> str | None:
        """Return the best device for a consumer on another server, of those that would take it; None if none would.

        Args:
            num_bytes: What it needs: the tightest fit is the best, then what gives it the most.
            rank: Its rank for these producers.
        """
        enough = bisect_left(self._order, (num_bytes, ""))
        place = self._first(enough, rank)
        if place is None:
            most = self._last_below(enough, rank)
            place = None if most is None else self._first(bisect_left(self._order, (self._order[most][0], "")), rank)
        return None if place is None else self._order[place][1]

    def _first(self, start: int, rank: Rank) -> int | None:
        """Return the first place from ``start`` on whose producer prefers a consumer of that rank."""
        node = self._size + start
        if start >= self._size:
            return None
        while self._worst[node] <= rank:
            while node % 2:  # a right child: the next place is beside an ancestor
                node //= 2
            if not node:
                return None
            node += 1
        while node < self._size:
            node = 2 * node + (self._worst[2 * node] <= rank)
        return node - self._size

    def _last_below(self, end: int, rank: Rank) -> int | None:
        """Return the last place before ``end`` whose producer prefers a consumer of that rank."""
        if not end:
            return None
        node = self._size + end - 1
        while self._worst[node] <= rank:
            while not node % 2:
                node //= 2
            if node == 1:
                return None
            node -= 1
        while node < self._size:
            node = 2 * node + (self._worst[2 * node + 1] > rank)
        return node - self._size
