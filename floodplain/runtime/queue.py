"""The waiting queue: a short sorted head, a heap of all sequences behind it, and kept places of aborted requests."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from itertools import islice
from operator import attrgetter, itemgetter

from floodplain.core.request import OrderKey, Request, SeqId
from floodplain.core.sequence import Sequence

_Entry = tuple[OrderKey, SeqId]


class WaitingQueue:
    """Sequences in the order of a key. Every operation costs O(log n + window): 100,000 waiting cost nothing per step.

    The first ``window`` are sorted in ``head``; the others are in a heap, from which removed ones are dropped lazily.
    The key is fixed for a sequence as long as it waits. ``shown`` also has ``num_newest`` sequences behind the head.
    """

    def __init__(
        self,
        key: Callable[[Sequence], OrderKey],
        window: int,
        num_newest: int = 0,
        client: Callable[[Sequence], str] = attrgetter("request.client"),
    ) -> None:
        self._key, self._client = key, client
        self._window, self._num_newest = window, num_newest
        self._head: list[_Entry] = []
        self._sequences: tuple[Sequence, ...] | None = None  # of the head, built on demand
        self._shown: tuple[Sequence, ...] | None = None
        self._heap: list[_Entry] = []
        self._members: dict[SeqId, tuple[OrderKey, Sequence]] = {}
        self._by_client: dict[str, dict[SeqId, None]] = {}  # the client that arrived last is the last one

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._members

    def head(self) -> tuple[Sequence, ...]:
        """The first ``window`` sequences, in order; the same object until the head changes."""
        if self._sequences is None:
            self._sequences = tuple([self._members[seq_id][1] for _, seq_id in self._head])
        return self._sequences

    def shown(self) -> tuple[Sequence, ...]:
        """The head and the newest sequences behind it, each in order; the same object until the queue changes."""
        if not self._num_newest or len(self._members) == len(self._head):
            return self.head()
        if self._shown is None:
            self._shown = (*self.head(), *self._newest())
        return self._shown

    def _newest(self) -> list[Sequence]:
        """The newest sequences behind the head, equally many of each client; a long line of one hides no other's."""
        shown = {seq_id for _, seq_id in self._head}
        lines = sorted(islice(reversed(self._by_client.values()), self._num_newest), key=len)
        found: list[SeqId] = []
        for index, line in enumerate(lines):
            part = (self._num_newest - len(found)) // (len(lines) - index)
            found += islice((seq_id for seq_id in reversed(line) if seq_id not in shown), part)
        return [seq for _, seq in sorted([self._members[seq_id] for seq_id in found], key=itemgetter(0))]

    def push(self, seq: Sequence) -> None:
        """Add a sequence."""
        entry = (self._key(seq), seq.seq_id)
        self._members[seq.seq_id] = (entry[0], seq)
        self._shown = None
        if self._num_newest:
            line = self._by_client.pop(self._client(seq), {})
            line[seq.seq_id] = None
            self._by_client[self._client(seq)] = line
        if len(self._head) < self._window and not self._heap:
            self._insert(entry)
        elif self._head and entry < self._head[-1]:
            self._insert(entry)
            if len(self._head) > self._window:
                heapq.heappush(self._heap, self._head.pop())
        else:
            heapq.heappush(self._heap, entry)
            self._refill()

    def remove(self, seq_id: SeqId) -> Sequence:
        """Remove a sequence from any place and return it."""
        key, seq = self._members.pop(seq_id)
        self._shown = None
        if self._num_newest:
            self._forget(seq)
        entry = (key, seq_id)
        if self._head and entry <= self._head[-1]:
            self._head.remove(entry)
            self._sequences = None
            self._refill()
        elif len(self._heap) > 2 * (len(self._members) + self._window):
            self._drop_gone()
        return seq

    def _forget(self, seq: Sequence) -> None:
        line = self._by_client[self._client(seq)]
        del line[seq.seq_id]
        if not line:
            del self._by_client[self._client(seq)]

    def _insert(self, entry: _Entry) -> None:
        insort(self._head, entry)
        self._sequences = None

    def _refill(self) -> None:
        while self._heap and len(self._head) < self._window:
            entry = heapq.heappop(self._heap)
            member = self._members.get(entry[1])
            if member is not None and member[0] == entry[0] and entry not in self._head:
                self._head.append(entry)
                self._sequences = None

    def _drop_gone(self) -> None:
        """Rebuild the heap without removed entries, which are most of it. The removals before amortize the cost."""
        last = self._head[-1]
        entries = ((key, seq_id) for seq_id, (key, _) in self._members.items())
        self._heap = [entry for entry in entries if entry > last]
        heapq.heapify(self._heap)


RETRY_S = 30.0
"""Seconds after the abort for which a place is kept; clients that back off before a retry wait for less."""

MOST_PLACES = 10_000
"""Most places that are kept; the oldest are dropped first."""


class Retries:
    """Places of requests that were aborted before their first token, by API key and prompt.

    Else a client could disconnect and send again to count as a new request, which can still meet its TTFT goal.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[float, float]] = {}  # (arrival, time until which it is kept)

    def leave(self, request: Request, arrival_s: float, now: float) -> None:
        """Keep the place of a request aborted at ``now``: its arrival, or that of the request before it."""
        self._kept.pop(_name(request), None)
        self._kept[_name(request)] = (arrival_s, now + RETRY_S)
        while len(self._kept) > MOST_PLACES:
            del self._kept[next(iter(self._kept))]

    def take(self, request: Request) -> float:
        """The arrival by which a new request has its place; of two equal requests only the first has the kept one."""
        arrival_s, until_s = self._kept.pop(_name(request), (request.arrival_s, 0.0))
        return min(arrival_s, request.arrival_s) if request.arrival_s <= until_s else request.arrival_s


def _name(request: Request) -> tuple[str, int]:
    return request.client, hash(request.prompt_token_ids)
