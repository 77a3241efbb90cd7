"""Producers of a domain that are reached over equally fast links, and which of them would take a consumer.

A consumer on another server ranks all of them alike, and they rank it alike. So the first of them that would take it
is found in logarithmic time: no consumer asks those in turn that would refuse it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Rank = tuple[int, int, bool, str]
"""Of a consumer, by a producer: the least is the best."""
FREE: tuple[int] = (1,)
"""Above every rank, whose first number is negative: a free producer takes any consumer."""


class Offers:
    """See the module: a tree over the producers, each node of which knows the worst rank that is held below it.

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
        """A producer holds a consumer that it ranks so."""
        node = self._size + self._place[device]
        self._worst[node] = rank
        while node := node // 2:
            self._worst[node] = max(self._worst[2 * node], self._worst[2 * node + 1])

    def best_for(self, num_bytes: int, rank: Rank) -> str | None:
        """The device that a consumer on another server wants most, of those that would rather have it.

        Args:
            num_bytes: What it needs: the tightest fit is the best, then what gives it the most.
            rank: What it is to these producers.
        """
        enough = bisect_left(self._order, (num_bytes, ""))
        place = self._first(enough, rank)
        if place is None:
            most = self._last_below(enough, rank)
            place = None if most is None else self._first(bisect_left(self._order, (self._order[most][0], "")), rank)
        return None if place is None else self._order[place][1]

    def _first(self, start: int, rank: Rank) -> int | None:
        """The first place from ``start`` on whose producer would rather have a consumer of that rank."""
        node = self._size + start
        if start >= self._size:
            return None
        while self._worst[node] <= rank:
            while node % 2:  # a right child: what follows is beside an ancestor
                node //= 2
            if not node:
                return None
            node += 1
        while node < self._size:
            node = 2 * node + (self._worst[2 * node] <= rank)
        return node - self._size

    def _last_below(self, end: int, rank: Rank) -> int | None:
        """The last place before ``end`` whose producer would rather have a consumer of that rank."""
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
