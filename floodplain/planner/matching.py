"""Pairs consumers with producers: a stable matching inside a domain, by need and link (AQUA, section 5).

A consumer prefers the producer that gives it the most of its need, then the faster link, then its own server, then the
tightest fit. A producer prefers the consumer that needs most, then the faster link, then its own server. *Stable*: no
producer and consumer would both prefer each other. Over equal links it also matches the most bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np


@dataclass(frozen=True, slots=True)
class Party:
    """A GPU that lends or needs ``num_bytes``; ``link`` is its server's, in bytes per second. Pairs share a domain."""

    device: str
    server: str
    domain: str
    num_bytes: int
    link: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A consumer may borrow from a producer; both are names of devices.

    ``link`` is in bytes per second: what the consumer gets of the producer's link if all its consumers use it.
    """

    producer: str
    consumer: str
    num_bytes: int
    link: int


def match(producers: Sequence[Party], consumers: Sequence[Party], consumers_per_producer: int = 1) -> tuple[Pair, ...]:
    """Stable pairs, sorted by producer and consumer.

    With several consumers per producer, consumers without a pair after one round are matched in another one with the
    rest of the producers' bytes. So sharing takes bandwidth from earlier pairs, and never bytes.
    """
    left = {party.device: party for party in producers}
    alone = {party.device: party for party in consumers}
    found: list[tuple[Party, Party, int]] = []
    for _ in range(consumers_per_producer):
        pairs = match_once(list(left.values()), list(alone.values()))
        if not pairs:
            break
        for producer, consumer in pairs:
            num_bytes = min(producer.num_bytes, consumer.num_bytes)
            found.append((producer, consumer, num_bytes))
            left[producer.device] = replace(producer, num_bytes=producer.num_bytes - num_bytes)
            del alone[consumer.device]
        left = {device: party for device, party in left.items() if party.num_bytes}
    sharing = Counter(producer.device for producer, _, _ in found)
    shared = [Pair(p.device, c.device, num, min(p.link // sharing[p.device], c.link)) for p, c, num in found]
    return tuple(sorted(shared, key=lambda pair: (pair.producer, pair.consumer)))


def match_once(producers: Sequence[Party], consumers: Sequence[Party]) -> list[tuple[Party, Party]]:
    """The stable one-to-one matching that is best for consumers (Gale and Shapley), in each domain.

    Consumers that need most propose first, so that over equal links no proposal is ever refused.
    """
    by_device = {producer.device: producer for producer in producers}
    on_server, offers = _by_server(producers), _offers(producers)
    held: dict[str, Party] = {}
    free = sorted(consumers, key=lambda c: (c.num_bytes, c.device))
    while free:
        consumer = free.pop()
        would = [p for p in on_server[consumer.domain, consumer.server] if _would_take(p, consumer, held)]
        for link, each in offers[consumer.domain].items():
            device = each.best_for(consumer.num_bytes, _rank_over(link, consumer, is_elsewhere=True))
            would += [by_device[device]] if device is not None else []
        if would:
            producer = min(would, key=partial(_rank_for, consumer))
            free += [held[producer.device]] if producer.device in held else []
            held[producer.device] = consumer
            offers[producer.domain][producer.link].hold(producer.device, _rank_by(producer, consumer))
    return [(by_device[device], consumer) for device, consumer in held.items()]


def _by_server(producers: Sequence[Party]) -> defaultdict[tuple[str, str], list[Party]]:
    found: defaultdict[tuple[str, str], list[Party]] = defaultdict(list)
    for producer in producers:
        found[producer.domain, producer.server].append(producer)
    return found


def _offers(producers: Sequence[Party]) -> defaultdict[str, dict[int, Offers]]:
    alike: defaultdict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    for producer in producers:
        alike[producer.domain, producer.link].append((producer.num_bytes, producer.device))
    found: defaultdict[str, dict[int, Offers]] = defaultdict(dict)
    for (domain, link), some in alike.items():
        found[domain][link] = Offers(some)
    return found


def _would_take(producer: Party, consumer: Party, held: Mapping[str, Party]) -> bool:
    now = held.get(producer.device)
    return now is None or _rank_by(producer, consumer) < _rank_by(producer, now)


def _rank_for(consumer: Party, producer: Party) -> tuple[object, ...]:
    gets, link = min(producer.num_bytes, consumer.num_bytes), min(producer.link, consumer.link)
    return -gets, -link, producer.server != consumer.server, producer.num_bytes, producer.device


def _rank_by(producer: Party, consumer: Party) -> Rank:
    return _rank_over(producer.link, consumer, is_elsewhere=producer.server != consumer.server)


def _rank_over(link: int, consumer: Party, *, is_elsewhere: bool) -> Rank:
    return -consumer.num_bytes, -min(link, consumer.link), is_elsewhere, consumer.device


def matched_bytes(lent: Sequence[int], needed: Sequence[int]) -> int:
    """The most bytes that one-to-one pairs can match: the largest with the largest, and so on."""
    return sum(map(min, sorted(lent, reverse=True), sorted(needed, reverse=True)))


Rank = tuple[int, int, bool, str]
"""A consumer's rank for a producer: the least is the best."""
FREE: tuple[int] = (1,)
"""Above every rank, whose first number is negative: a free producer takes any consumer."""


class Offers:
    """Producers with equally fast links, and the rank of the consumer that each of them holds.

    A consumer on another server ranks all of them alike, and they rank it alike: those that would refuse it are found
    in one comparison of arrays.
    """

    def __init__(self, producers: Sequence[tuple[int, str]]) -> None:
        self._order = sorted(producers)
        self._place = {device: place for place, (_, device) in enumerate(self._order)}
        self._held = np.empty(len(producers), dtype=object)
        self._held.fill(FREE)

    def hold(self, device: str, rank: Rank) -> None:
        """Record the rank of the consumer that a producer now holds."""
        self._held[self._place[device]] = rank

    def best_for(self, num_bytes: int, rank: Rank) -> str | None:
        """The best device for a consumer of that rank on another server; None if none would take it.

        The tightest fit of what it needs is the best, then what gives it the most.
        """
        own = np.empty((), dtype=object)
        own[()] = rank
        takers = np.flatnonzero(self._held > own)
        if not takers.size:
            return None
        enough = min(num_bytes, self._order[takers[-1]][0])
        best = np.searchsorted(takers, bisect_left(self._order, (enough, "")))
        return self._order[int(takers[best])][1]
