"""Prices of links follow completed copies; the oracle is the line behind their times."""

from __future__ import annotations

from random import Random

import pytest

from floodplain.core.tiers import CopyTime, Direction, Link, Tier
from floodplain.runtime.links import Links

BLOCK_BYTES = 1000
BLOCK_S = 1e-4
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
MEASURED = Link(Tier.HOST, BLOCK_BYTES / BLOCK_S)


def block_s(links: Links) -> float:
    return BLOCK_BYTES / links[Tier.HOST].bandwidth


def copy(links: Links, num_blocks: int, latency_s: float, price_s: float, way: Direction = OUT) -> None:
    links.learn(CopyTime(Tier.HOST, way, 1, num_blocks, latency_s + num_blocks * price_s))


def copy_often(links: Links, latency_s: float, price_s: float, num_times: int = 300, noise: float = 0.0) -> None:
    dice = Random(1)
    for number in range(num_times):
        factor = dice.uniform(1 - noise, 1 + noise)
        copy(
            links, dice.choice([1, 1, 4, 12, 40]), latency_s * factor, price_s * factor, way=(OUT, IN)[number % 2 == 0]
        )


def test_before_the_first_copy_it_is_what_was_measured() -> None:
    assert Links([MEASURED], BLOCK_BYTES)[Tier.HOST] == MEASURED


def test_copies_as_quick_as_measured_change_nothing() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, BLOCK_S)
    assert block_s(links) == pytest.approx(BLOCK_S)
    assert links[Tier.HOST].latency_s == pytest.approx(0.0, abs=1e-9)


def test_a_link_whose_blocks_seem_to_cost_nothing_stays_as_it_was() -> None:
    """Large copies that take less time than small ones are noise: no bandwidth fits."""
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, 3 * BLOCK_S)
    known = links[Tier.HOST]
    for number in range(800):
        num_blocks, seconds = ((1, 0.01), (1000, 0.005))[number // 2 % 2]
        links.learn(CopyTime(Tier.HOST, (OUT, IN)[number % 2 == 0], 1, num_blocks, seconds))
    assert links[Tier.HOST] == known != MEASURED


@pytest.mark.parametrize("factor", [0.2, 5.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_link_that_has_become_quicker_or_slower_is_followed(factor: float, noise: float) -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, factor * BLOCK_S, noise=noise)
    assert block_s(links) == pytest.approx(factor * BLOCK_S, rel=0.3 if noise else 0.1)
    copy_often(links, 0.0, BLOCK_S, noise=noise)
    assert block_s(links) == pytest.approx(BLOCK_S, rel=0.3 if noise else 0.1)


def test_what_each_copy_costs_by_itself_is_not_the_price_of_a_block() -> None:
    """Single blocks take six times as long as blocks of a large copy: a mean would price blocks too high."""
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 5 * BLOCK_S, BLOCK_S)
    assert block_s(links) == pytest.approx(BLOCK_S, rel=0.15)
    assert links[Tier.HOST].latency_s == pytest.approx(5 * BLOCK_S, rel=0.15)


def test_one_slow_copy_is_no_slow_link() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, BLOCK_S)
    copy(links, 10, 1.0, BLOCK_S)
    assert block_s(links) < 2 * BLOCK_S


def test_the_slower_direction_counts() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    for _ in range(300):
        copy(links, 10, 0.0, 4 * BLOCK_S, way=IN)
        copy(links, 10, 0.0, BLOCK_S / 2)
    assert block_s(links) == pytest.approx(4 * BLOCK_S, rel=0.1)


def test_tiers_are_priced_apart() -> None:
    links = Links([MEASURED, Link(Tier.PEER, 1e9, 1e-5)], BLOCK_BYTES)
    copy_often(links, 0.0, 5 * BLOCK_S)
    assert links[Tier.PEER] == Link(Tier.PEER, 1e9, 1e-5)


@pytest.mark.parametrize("copied", [CopyTime(Tier.HOST, IN, 1, 0, 1.0), CopyTime(Tier.HOST, IN, 1, 5, 0.0)])
def test_from_nothing_nothing_is_learned(copied: CopyTime) -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    links.learn(copied)
    assert links[Tier.HOST] == MEASURED
