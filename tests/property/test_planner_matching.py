"""Pairs of producers and consumers: stable, within domains, and over equal links with the most bytes possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.planner import matching
from floodplain.planner.matching import Pair, Party, match
from tests.support.planning import most_matched

GB = 10**9


@st.composite
def sides(draw: st.DrawFn, *, is_even: bool = False) -> tuple[list[Party], list[Party]]:
    """Draw producers and consumers on servers of up to two domains; if even, in one domain with equal links."""
    links = [450] if is_even else [0, 100, 450]
    servers = [
        (f"s{i}", "d0" if is_even else draw(st.sampled_from(["d0", "d1"])), draw(st.sampled_from(links)))
        for i in range(3)
    ]

    def party(name: str) -> Party:
        server, domain, link = draw(st.sampled_from(servers))
        return Party(name, server, domain, draw(st.integers(1, 8)) * GB, link * GB)

    return (
        [party(f"p{i}") for i in range(draw(st.integers(0, 6)))],
        [party(f"c{i}") for i in range(draw(st.integers(0, 6)))],
    )


def blocking(producers: Sequence[Party], consumers: Sequence[Party], pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return producers and consumers of a domain that prefer each other to their partners."""
    of_producer = {pair.producer: pair.consumer for pair in pairs}
    of_consumer = {pair.consumer: pair.producer for pair in pairs}
    by_name = {party.device: party for party in (*producers, *consumers)}

    def score(mine: Party, other: Party | None, num_bytes: int) -> tuple[int, int, bool]:
        if other is None:
            return (-1, 0, False)
        return num_bytes, min(mine.link, other.link), mine.server == other.server

    found = []
    for p in producers:
        for c in consumers:
            old_p, old_c = by_name.get(of_consumer.get(c.device, "")), by_name.get(of_producer.get(p.device, ""))
            old_gets = min(old_p.num_bytes, c.num_bytes) if old_p else 0
            c_gains = score(c, p, min(p.num_bytes, c.num_bytes)) > score(c, old_p, old_gets)
            p_gains = score(p, c, c.num_bytes) > score(p, old_c, old_c.num_bytes if old_c else 0)
            if p.domain == c.domain and c_gains and p_gains:
                found.append((p.device, c.device))
    return found


@given(sides())
def test_no_producer_and_consumer_would_rather_have_each_other(both: tuple[list[Party], list[Party]]) -> None:
    producers, consumers = both
    pairs = match(producers, consumers)
    assert blocking(producers, consumers, pairs) == []
    assert (
        max([*Counter(p.producer for p in pairs).values(), *Counter(p.consumer for p in pairs).values()], default=1)
        == 1
    )
    domains = {party.device: party.domain for party in (*producers, *consumers)}
    assert all(domains[pair.producer] == domains[pair.consumer] for pair in pairs)


@given(sides(is_even=True))
def test_over_equal_links_the_most_bytes_are_matched(both: tuple[list[Party], list[Party]]) -> None:
    producers, consumers = both
    most = most_matched([p.num_bytes for p in producers] + [-c.num_bytes for c in consumers])
    assert sum(pair.num_bytes for pair in match(producers, consumers)) == most
    assert matching.matched_bytes([p.num_bytes for p in producers], [c.num_bytes for c in consumers]) == most


@given(sides(), st.integers(1, 4))
def test_sharing_takes_no_bytes_from_any_consumer(both: tuple[list[Party], list[Party]], num: int) -> None:
    producers, consumers = both
    alone, shared = match(producers, consumers), match(producers, consumers, num)
    got = {pair.consumer: pair.num_bytes for pair in shared}
    assert all(got[pair.consumer] >= pair.num_bytes for pair in alone)
    sharing = Counter(pair.producer for pair in shared)
    assert max(sharing.values(), default=0) <= num
    for producer in producers:
        mine = [pair for pair in shared if pair.producer == producer.device]
        assert sum(pair.num_bytes for pair in mine) <= producer.num_bytes
        assert sum(pair.link for pair in mine) <= producer.link


@given(sides())
def test_pairs_do_not_depend_on_the_order_of_the_sides(both: tuple[list[Party], list[Party]]) -> None:
    producers, consumers = both
    assert match(producers, consumers) == match(producers[::-1], consumers[::-1])


def test_a_consumer_ranks_producers_by_bytes_link_server_and_fit() -> None:
    c = Party("c", "s", "d", 10, 100)
    far, slow = Party("far", "t", "d", 10, 100), Party("slow", "s", "d", 12, 50)
    wide, tight, small = (
        Party("wide", "s", "d", 30, 100),
        Party("tight", "s", "d", 11, 100),
        Party("small", "s", "d", 9, 900),
    )
    order = [small, slow, far, wide, tight]
    for i in range(1, len(order) + 1):
        assert [pair.producer for pair in match(order[:i], [c])] == [order[i - 1].device]


def test_an_unstable_matching_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: producers have no preference, so the first consumer keeps its producer."""
    monkeypatch.setattr(matching, "_would_take", lambda producer, consumer, held: producer.device not in held)
    producers = [Party("p0", "s", "d", 8, 450), Party("p1", "t", "d", 8, 10)]
    consumers = [Party("c0", "t", "d", 9, 10), Party("c1", "s", "d", 8, 450)]
    stable = (Pair("p0", "c0", 8, 10),)
    assert blocking(producers[:1], consumers, stable) == []
    assert blocking(producers[:1], consumers, (Pair("p0", "c1", 8, 450),)) == [("p0", "c0")]
