"""Which consumer borrows from which producer: a stable matching inside a domain, by need and link (AQUA, section 5).

A consumer prefers the producer that gives it the most of what it needs, then the faster link, then its own server,
then the tightest fit. A producer prefers the consumer that needs most, then the faster link, then its own server. The
matching is *stable*: no producer and consumer would both rather have each other. Over equal links it also matches the
most bytes that any one-to-one matching can.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Party:
    """A GPU that lends or needs memory.

    Attributes:
        device: Its name.
        server: Its server's.
        domain: Its server's: parties of two domains are never paired.
        num_bytes: What it lends or needs; positive.
        link: Of its server: bytes per second.
    """

    device: str
    server: str
    domain: str
    num_bytes: int
    link: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A consumer may borrow from a producer.

    Attributes:
        producer: Its device's name.
        consumer: Its device's name.
        num_bytes: As much is matched.
        link: Bytes per second that the consumer has of the producer's link, if all who share it use it.
    """

    producer: str
    consumer: str
    num_bytes: int
    link: int


Rank = tuple[object, ...]


def match(producers: Sequence[Party], consumers: Sequence[Party], consumers_per_producer: int = 1) -> tuple[Pair, ...]:
    """Stable pairs, by producer and consumer.

    With several consumers per producer, consumers that one round leaves alone are matched in a further one with what
    is left of the producers' bytes. So sharing takes bandwidth from earlier pairs, and never bytes.

    Args:
        producers: Their bytes are what they lend.
        consumers: Their bytes are what they need.
        consumers_per_producer: At most so many share a producer.
    """
    left = {party.device: party for party in producers}
    alone = {party.device: party for party in consumers}
    found: list[tuple[Party, Party, int]] = []
    for _ in range(consumers_per_producer):
        for producer, consumer in match_once(list(left.values()), list(alone.values())):
            num_bytes = min(producer.num_bytes, consumer.num_bytes)
            found.append((producer, consumer, num_bytes))
            left[producer.device] = _less(producer, num_bytes)
            del alone[consumer.device]
        left = {device: party for device, party in left.items() if party.num_bytes}
    sharing = Counter(producer.device for producer, _, _ in found)
    pairs = [Pair(p.device, c.device, num_bytes, min(p.link // sharing[p.device], c.link)) for p, c, num_bytes in found]
    return tuple(sorted(pairs, key=lambda pair: (pair.producer, pair.consumer)))


def match_once(producers: Sequence[Party], consumers: Sequence[Party]) -> list[tuple[Party, Party]]:
    """The stable one-to-one matching that is best for consumers (Gale and Shapley), in each domain.

    Consumers that need most propose first, so that over equal links no proposal is ever refused.
    """
    in_domain: defaultdict[str, list[Party]] = defaultdict(list)
    for producer in producers:
        in_domain[producer.domain].append(producer)
    held: dict[str, Party] = {}
    free = sorted(consumers, key=lambda c: (c.num_bytes, c.device))
    refused: defaultdict[str, set[str]] = defaultdict(set)
    while free:
        consumer = free.pop()
        wanted = [p for p in in_domain[consumer.domain] if p.device not in refused[consumer.device]]
        for producer in sorted(wanted, key=rank_for(consumer)):
            holder = held.get(producer.device)
            if holder is None or prefer(producer, consumer, holder):
                held[producer.device] = consumer
                if holder is not None:
                    refused[holder.device].add(producer.device)
                    free.append(holder)
                break
            refused[consumer.device].add(producer.device)
    by_device = {producer.device: producer for producer in producers}
    return [(by_device[device], consumer) for device, consumer in held.items()]


def rank_for(consumer: Party) -> Callable[[Party], Rank]:
    """How a consumer ranks a producer: the least is the best."""

    def rank(producer: Party) -> Rank:
        gets = min(producer.num_bytes, consumer.num_bytes)
        return -gets, *_distance(producer, consumer), producer.num_bytes, producer.device

    return rank


def prefer(producer: Party, one: Party, other: Party) -> bool:
    """Whether a producer would rather lend to ``one`` consumer than to the ``other``."""
    return _rank_by(producer, one) < _rank_by(producer, other)


def _rank_by(producer: Party, consumer: Party) -> tuple[int, int, bool, str]:
    return -consumer.num_bytes, *_distance(producer, consumer), consumer.device


def _distance(one: Party, other: Party) -> tuple[int, bool]:
    return -min(one.link, other.link), one.server != other.server


def _less(party: Party, num_bytes: int) -> Party:
    return Party(party.device, party.server, party.domain, party.num_bytes - num_bytes, party.link)


def matched_bytes(lent: Sequence[int], needed: Sequence[int]) -> int:
    """The most bytes that one-to-one pairs can match: the largest with the largest, and so on."""
    return sum(map(min, sorted(lent, reverse=True), sorted(needed, reverse=True)))
