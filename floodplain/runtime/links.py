"""What copies cost on each link, learned from the copies that ran: a link that others use, too, is slower today.

A copy is priced as a line, so much for itself and for each block, for each direction. What was measured or modelled at
the start is where the lines begin, and where they return to when nothing has been copied for a while: else a link that
was too slow for turns once would never be tried again. Policies see the slower direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from floodplain.core.tiers import CopyTime, Direction, Link, Tier
from floodplain.runtime.line import Line

_NOISE = 1.0
"""How far a copy may be off its price, as a part of it: on a busy processor copies wait for a core."""

_MOST = 4.0
"""Times its price: what takes longer says no more than that, since a single copy may have waited for anything."""

_DRIFT = 0.1
"""How far a price may move from one copy to the next, as a part of it: a new one counts about a tenth."""


FORGET_STEPS = 1_000
"""After so many steps without a copy nobody knows what copies cost now."""


class Links:
    """The links of one engine, by the tier at their far end, as they are now.

    Args:
        links: As measured or modelled at the start.
        block_bytes: Bytes of one KV block.
    """

    def __init__(self, links: Iterable[Link], block_bytes: int) -> None:
        self._first = {link.tier: link for link in links}
        self._block_bytes = block_bytes
        self._last_step: int | None = None
        self._forget()

    def __getitem__(self, tier: Tier) -> Link:
        """The link as of the last copy."""
        if tier in self._stale:
            self._stale.remove(tier)
            self._now[tier] = self._price(tier)
        return self._now[tier]

    def as_of(self, step: int) -> Links:
        """Itself, once more as at the start if the last copy is ``FORGET_STEPS`` ago."""
        if self._last_step is None:
            self._last_step = step
        elif step - self._last_step > FORGET_STEPS:
            self._last_step = step
            self._forget()
        return self

    def learn(self, copied: CopyTime) -> None:
        """Copies took this long. What took no time at all is nothing to learn from."""
        if copied.num_blocks < 1 or copied.duration_s <= 0:
            return
        self._last_step = None
        line = self._lines[copied.tier, copied.direction]
        amounts = (copied.num_copies, copied.num_blocks)
        expected_s = line.price(amounts) or copied.duration_s
        line.learn(amounts, min(copied.duration_s, _MOST * expected_s), scale=expected_s)
        line.weights = [max(0.0, weight) for weight in line.weights]
        self._stale.add(copied.tier)

    def _price(self, tier: Tier) -> Link:
        """The slower direction counts; as it was if blocks cost nothing by now, which no bandwidth can say."""
        latencies, prices = zip(*(self._lines[tier, way].weights for way in Direction), strict=True)
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
    return Line((link.latency_s, block_s), (max(link.latency_s, block_s), block_s), noise=_NOISE, drift=_DRIFT)
