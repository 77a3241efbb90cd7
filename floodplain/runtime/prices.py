"""Linear prices learned from payments, of steps and of copies: policies compare copies with computing by them.

The price of a step is a constant, a price per decode and a price per prompt token. A Kalman filter tracks them as they
drift. A price stays as it is while no step has its part; if steps cannot distinguish two prices, both change. Where the
cores that compute also make copies, steps beside copies are slower; so a second line learns from the other steps.

The part of prompts in the work is computed from the prompts of ended requests and the decodes of all requests: short
answers end first when a load begins, so ended requests alone would make outputs look shorter than they are.

The price of a copy is a constant plus a price per block, for each direction. It starts as measured or modelled, and
returns to that when nothing has been copied for a while: else a link that was once too slow for turns would never be
tried again. Policies see the slower direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from floodplain.core.tiers import CopyTime, Direction, Link, Tier
from floodplain.core.transfers import TransferLedger
from floodplain.core.view import Prices, TierView

Amounts = tuple[float, float, float]


class Line:
    """Unit prices of three amounts and their uncertainty: a Kalman filter of drifting weights.

    Errors are relative, so that small and large payments teach equally much. The sums are written out, since loops over
    three numbers take five times as long. An amount that is always 0 has no part in them.

    Args:
        weights: Initial unit price of each amount.
        sizes: Standard deviation of each initial price.
        noise: Relative standard deviation of a single payment from its price.
        drift: Relative standard deviation of a price's change from one payment to the next.
    """

    def __init__(self, weights: Amounts, sizes: Amounts, *, noise: float, drift: float) -> None:
        self.weights = weights
        self._noise, self._drift = noise, drift
        self._cov = (sizes[0] ** 2, 0.0, 0.0, sizes[1] ** 2, 0.0, sizes[2] ** 2)  # the upper triangle, by rows

    def price(self, amounts: Amounts) -> float:
        """The price of these amounts."""
        (w0, w1, w2), (a0, a1, a2) = self.weights, amounts
        return w0 * a0 + w1 * a1 + w2 * a2

    def learn(self, amounts: Amounts, paid: float, scale: float | None = None) -> None:
        """Learn that ``amounts`` cost ``paid``; errors are relative to ``scale``, else ``paid``; both above 0.

        Relative to ``paid``, a payment far above its price teaches less than one far below.
        """
        scale = scale or paid
        (w0, w1, w2), (a0, a1, a2), (c00, c01, c02, c11, c12, c22) = self.weights, amounts, self._cov
        f0, f1, f2 = a0 / scale, a1 / scale, a2 / scale
        c00 += (self._drift * w0) ** 2 * (a0 > 0)
        c11 += (self._drift * w1) ** 2 * (a1 > 0)
        c22 += (self._drift * w2) ** 2 * (a2 > 0)
        t0 = c00 * f0 + c01 * f1 + c02 * f2
        t1 = c01 * f0 + c11 * f1 + c12 * f2
        t2 = c02 * f0 + c12 * f1 + c22 * f2
        doubt = self._noise**2 + (t0 * f0 + t1 * f1 + t2 * f2)
        error = paid / scale - (w0 * f0 + w1 * f1 + w2 * f2)
        self.weights = (w0 + t0 * error / doubt, w1 + t1 * error / doubt, w2 + t2 * error / doubt)
        self._cov = (
            c00 - t0 * t0 / doubt, c01 - t0 * t1 / doubt, c02 - t0 * t2 / doubt,
            c11 - t1 * t1 / doubt, c12 - t1 * t2 / doubt, c22 - t2 * t2 / doubt,
        )  # fmt: skip


_GUESS = (1.0, 1 / 16, 1 / 8)
"""Initial uncertainty of the prices (constant, decode, prompt token), as parts of the first step's time."""

_NOISE = 0.1
"""Relative deviation of a step from its price."""

_SMOOTHING = 0.1
"""Weight of the newest step in the mean number of decodes."""

_FORGETTING = 0.02
"""Part of the counted prompt and output tokens that is dropped whenever a request ends."""

_DRIFT = 0.015
"""Relative change of a price from one step that includes it to the next."""


class StepPrices:
    """The current prices. Equal durations give equal prices, in the engine and the simulator."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._unloaded: Line | None = None
        self._num_decodes: float | None = None  # a running mean over steps that had some
        self._has_prefill = False
        self._num_prompt_tokens = 0.0  # of recently ended requests
        self._num_output_tokens = 0.0  # of all requests in that time, without first tokens
        self._prices = Prices()

    @property
    def now(self) -> Prices:
        """The prices as of the last completed step; the same object until they change."""
        return self._prices

    def learn(self, num_decodes: int, num_prefill: int, duration_s: float, *, has_copies: bool = False) -> None:
        """Learn from the time of a step; ``has_copies``: copies ran beside it."""
        if not (num_decodes or num_prefill) or duration_s <= 0:
            return
        amounts = (1.0, float(num_decodes), float(num_prefill))
        self._line = self._line or _first_line(duration_s)
        self._line.learn(amounts, duration_s)
        if not has_copies:
            self._unloaded = self._unloaded or _first_line(duration_s)
            self._unloaded.learn(amounts, duration_s)
        self._num_output_tokens += num_decodes
        if num_decodes:
            mean = num_decodes if self._num_decodes is None else self._num_decodes
            self._num_decodes = mean + _SMOOTHING * (num_decodes - mean)
        self._has_prefill = self._has_prefill or num_prefill > 0
        self._prices = self._price(self._line.weights)

    def learn_end(self, num_prompt: int) -> None:
        """Count the computed prompt tokens of a request that ended."""
        self._num_prompt_tokens += num_prompt - _FORGETTING * self._num_prompt_tokens
        self._num_output_tokens -= _FORGETTING * self._num_output_tokens

    def _price(self, weights: Amounts) -> Prices:
        base_s, decode_s, token_s = weights
        step_s = 0.0 if self._num_decodes is None else max(0.0, base_s + decode_s * self._num_decodes)
        token_s = max(0.0, token_s) if self._has_prefill else 0.0
        lone_step_s = max(0.0, base_s + decode_s) if step_s else 0.0
        unloaded_step_s = max(0.0, sum(self._unloaded.weights[:2])) if step_s and self._unloaded else 0.0
        return Prices(step_s, token_s, self._prompt_share(step_s, token_s), lone_step_s, unloaded_step_s)

    def _prompt_share(self, step_s: float, token_s: float) -> float:
        prompts_s = self._num_prompt_tokens * token_s
        if not (self._num_decodes and step_s and prompts_s):
            return 0.0
        return prompts_s / (prompts_s + self._num_output_tokens * step_s / self._num_decodes)


def _first_line(duration_s: float) -> Line:
    base, decode, token = _GUESS
    sizes = (base * duration_s, decode * duration_s, token * duration_s)
    return Line((0.0, 0.0, 0.0), sizes, noise=_NOISE, drift=_DRIFT)


_LINK_NOISE = 1.0
"""Relative deviation of a copy from its price: on a busy processor copies wait for a core."""

_MOST = 4.0
"""Longer copy times are clamped to so many times the price, since a single copy may have waited for anything."""

_LINK_DRIFT = 0.1
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
    return Line((link.latency_s, block_s, 0.0), sizes, noise=_LINK_NOISE, drift=_LINK_DRIFT)
