"""Prices of copies on each link, learned from copies, since other processes may use a link, too.

A copy is priced as a line, a constant plus a price per block, for each direction. The lines start at the values that
were measured or modelled at the start, and return to them when nothing has been copied for a while: else a link that
was once too slow for turns would never be tried again. Policies see the slower direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from floodplain.core.tiers import CopyTime, Direction, Link, Tier
from floodplain.core.transfers import TransferLedger
from floodplain.core.view import TierView
from floodplain.runtime.prices import Line

_NOISE = 1.0
"""Relative deviation of a copy from its price: on a busy processor copies wait for a core."""

_MOST = 4.0
"""Longer copy times are clamped to so many times the price, since a single copy may have waited for anything."""

_DRIFT = 0.1
"""Relative change of a price from one copy to the next: a new copy weighs about a tenth."""


FORGET_STEPS = 1_000
"""Steps without a copy after which learned prices are dropped as outdated."""


class Links:
    """The current links of one engine, by the tier at their far end; prices start as measured or modelled."""

    def __init__(self, links: Iterable[Link], block_bytes: int) -> None:
        self._first = {link.tier: link for link in links}
        self._block_bytes = block_bytes
        self._last_step: int | None = None
        self._forget()

    def __getitem__(self, tier: Tier) -> Link:
        if tier in self._stale:
            self._stale.remove(tier)
            self._now[tier] = self._price(tier)
        return self._now[tier]

    def note_step(self, step: int) -> None:
        """Return to the prices of the start if the last copy is more than ``FORGET_STEPS`` before step ``step``."""
        if self._last_step is None:
            self._last_step = step
        elif step - self._last_step > FORGET_STEPS:
            self._last_step = step
            self._forget()

    def view_tiers(self, transfers: TransferLedger[Any]) -> tuple[TierView, ...]:
        """Swap space as policies see it, without tiers that have no slots now."""
        backups = transfers.backups
        return tuple(
            TierView(
                tier,
                backups.num_available(tier),
                slots.num_slots,
                self._block_bytes / self[tier].bandwidth,
                self[tier].latency_s,
                transfers.count_blocks(tier, Direction.OUTBOUND),
                transfers.count_blocks(tier, Direction.INBOUND),
            )
            for tier, slots in backups.slots.items()
            if slots.num_slots
        )

    def learn(self, copied: CopyTime) -> None:
        """Learn from the time of copies; a duration of 0 is ignored."""
        if copied.num_blocks < 1 or copied.duration_s <= 0:
            return
        self._last_step = None
        line = self._lines[copied.tier, copied.direction]
        amounts = (float(copied.num_copies), copied.num_blocks, 0.0)
        expected_s = line.price(amounts) or copied.duration_s
        line.learn(amounts, min(copied.duration_s, _MOST * expected_s), scale=expected_s)
        latency_s, block_s, _ = line.weights
        line.weights = (max(0.0, latency_s), max(0.0, block_s), 0.0)
        self._stale.add(copied.tier)

    def _price(self, tier: Tier) -> Link:
        """The link with the price of the slower direction; unchanged if the learned price of a block is 0."""
        latencies, prices, _ = zip(*(self._lines[tier, way].weights for way in Direction), strict=True)
        if max(prices) <= 0:
            return self._now[tier]
        return replace(self._now[tier], bandwidth=self._block_bytes / max(prices), latency_s=max(latencies))

    def _forget(self) -> None:
        self._now = dict(self._first)
        self._stale: set[Tier] = set()  # copies ran since their links were priced
        self._lines = {
            (tier, direction): _line(link, self._block_bytes)
            for tier, link in self._first.items()
            for direction in Direction
        }


def _line(link: Link, block_bytes: int) -> Line:
    block_s = block_bytes / link.bandwidth
    sizes = (max(link.latency_s, block_s), block_s, 0.0)
    return Line((link.latency_s, block_s, 0.0), sizes, noise=_NOISE, drift=_DRIFT)
