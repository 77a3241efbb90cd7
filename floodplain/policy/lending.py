"""How much of its KV pool an engine lends: what recent load does not need; nothing when load rises (AQUA, section 6).

*Offer*: after a calm time, lend all that the recent peak leaves, judged by the pool that remains. *Recall*: take
everything back at once, when requests wait, the pool fills, or the arrival rate is above that of the offer or of the
profile. Offers are at least a calm time apart, and a recall needs an offer before it, so the policy does not flap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, sqrt

from floodplain.core.errors import InvariantError


class LendingReason(Enum):
    """Why a lending decision was made."""

    STEADY = "steady"
    """Nothing changes."""
    CALM = "calm"
    """More can be spared: offer it."""
    WAITING = "waiting"
    """Requests wait: recall everything, as for the two reasons below."""
    POOL_FULL = "pool_full"
    """Used blocks pass the high watermark."""
    RATE_RISEN = "rate_risen"
    """The arrival rate is above that of the offer or of the profile."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """An engine's load at one moment.

    Attributes:
        now: Seconds of any monotonic clock.
        num_waiting: Live requests that are not on the device, although they could run.
        num_used_blocks: Blocks that live requests hold; cached prefixes do not count.
        full_blocks: Blocks of the pool if nothing were lent; constant.
        num_arrived: Requests since the start.
        can_offer: Whether an offer would reach the coordinator now.
    """

    now: float
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    full_blocks: int
    num_arrived: int
    can_offer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingSettings:
    """Watermarks and times of offers and recalls.

    Attributes:
        low: Part of the pool that the recent peak may take after an offer. With ``high`` it makes the hysteresis: load
            must grow by a third before an offer is taken back.
        high: Part of the pool in use from which on it recalls: above it, requests are about to wait.
        calm_s: Seconds of calm before an offer, and between two of them: copying back and forth costs a consumer more
            than it gains in a shorter time.
        busy_s: Seconds of trouble before a recall, so that a request that waits for one step is not enough.
        window_s: Seconds whose peak counts, and whose rate is that of the offer: long enough for a whole request.
        rate_window_s: Seconds over which arrivals are counted to detect a rise.
        rise: The rate has risen if arrivals are so many times those expected from the offer's rate, and
        rise_sigmas: exceed them by so many standard deviations of a Poisson count.
        least_part: Part of the pool below which a change is not worth the messages.
        profiled_rate: Requests per second of the steady state, from a profile; None: the rate at the offer counts.
        profiled_peak_blocks: Blocks in use at that rate. Lending always leaves room for them under ``high``, and the
            first offer needs no calm time; None: no profile.
    """

    low: float = 0.6
    high: float = 0.8
    calm_s: float = 10.0
    busy_s: float = 0.25
    window_s: float = 30.0
    rate_window_s: float = 10.0
    rise: float = 1.5
    rise_sigmas: float = 3.0
    least_part: float = 0.05
    profiled_rate: float | None = None
    profiled_peak_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise InvariantError(f"watermarks must be 0 < low < high <= 1, not {self.low} and {self.high}")
        if not 0 <= self.busy_s < self.calm_s:
            raise InvariantError(f"a recall must come sooner than an offer: {self.busy_s} s, {self.calm_s} s")

    def at_calm(self, calm_s: float) -> LendingSettings:
        """The same settings with ``calm_s`` seconds before an offer, and every other time in proportion."""
        factor = calm_s / self.calm_s
        return replace(
            self,
            calm_s=calm_s,
            busy_s=factor * self.busy_s,
            window_s=factor * self.window_s,
            rate_window_s=factor * self.rate_window_s,
        )


@dataclass(frozen=True, slots=True)
class LendingDecision:
    """Blocks of the full pool to lend from now on (0 recalls everything), and why."""

    target_blocks: int
    reason: LendingReason = LendingReason.STEADY


class LendingPolicy:
    """Decides how many blocks to lend. Equal loads in equal order give equal decisions.

    The pool always keeps ``least_blocks``, what the longest request needs; ``most_blocks`` None: as the load allows.
    """

    def __init__(self, settings: LendingSettings, least_blocks: int, most_blocks: int | None = None) -> None:
        self.settings = settings
        self._least_blocks = least_blocks
        self._most_blocks = most_blocks
        self._target = 0
        self._offered_rate: float | None = settings.profiled_rate
        self._calm_since_s: float | None = None if settings.profiled_peak_blocks is None else float("-inf")
        self._busy_since_s: float | None = None
        self._troubled_s = float("-inf")
        self._offered_s = float("-inf")
        self._peaks: deque[tuple[float, int]] = deque()  # (when, used blocks), falling: the first is the window's peak
        self._arrivals: deque[tuple[float, int]] = deque()  # (when, arrived so far); the first is as old as the window

    def decide(self, load: PoolLoad) -> LendingDecision:
        """The blocks to lend under this load; calls may be at any times, but in order of ``load.now``."""
        self._note(load)
        trouble = self._find_trouble(load)
        if trouble is not None:
            return self._bear(trouble, load.now)
        self._forget_trouble(load.now)
        if not self._is_calm(load):
            self._calm_since_s = None
            return LendingDecision(self._target)
        if self._calm_since_s is None:
            self._calm_since_s = load.now
        spare = self._spare_blocks(load)
        is_due = load.now - max(self._calm_since_s, self._offered_s) >= self.settings.calm_s
        if not (is_due and load.can_offer and spare - self._target >= max(1.0, self._least_change(load))):
            return LendingDecision(self._target)
        return self._offer(spare, load.now)

    # -- observed load ---------------------------------------------------------------------------------------------

    def _note(self, load: PoolLoad) -> None:
        while self._peaks and self._peaks[-1][1] <= load.num_used_blocks:
            self._peaks.pop()
        self._peaks.append((load.now, load.num_used_blocks))
        begin_s = load.now - self.settings.window_s
        while self._peaks[0][0] < begin_s:
            self._peaks.popleft()
        if not self._arrivals or self._arrivals[-1] != (load.now, load.num_arrived):
            self._arrivals.append((load.now, load.num_arrived))
        while len(self._arrivals) > 1 and self._arrivals[1][0] <= begin_s:
            self._arrivals.popleft()

    def _find_trouble(self, load: PoolLoad) -> LendingReason | None:
        if load.num_waiting:
            return LendingReason.WAITING
        if load.num_used_blocks > self.settings.high * self._room(load):
            return LendingReason.POOL_FULL
        return LendingReason.RATE_RISEN if self._has_rate_risen(load.now) else None

    def _has_rate_risen(self, now: float) -> bool:
        rate, settings = self._offered_rate, self.settings
        if rate is None:
            return False
        count, elapsed_s = self._count_arrivals(now, settings.rate_window_s)
        expected = rate * elapsed_s
        chance = settings.rise_sigmas * sqrt(expected + 1)
        return count - expected > max((settings.rise - 1) * expected, chance)

    def _count_arrivals(self, now: float, window_s: float) -> tuple[int, float]:
        """(requests of the last ``window_s`` or a little more, the exact seconds)."""
        then_s, before = self._arrivals[0]
        for when_s, arrived in reversed(self._arrivals):
            then_s, before = when_s, arrived
            if when_s <= now - window_s:
                break
        return self._arrivals[-1][1] - before, now - then_s

    def _rate_over(self, now: float, window_s: float) -> float:
        count, elapsed_s = self._count_arrivals(now, window_s)
        return count / elapsed_s if elapsed_s > 0 else 0.0

    def _is_calm(self, load: PoolLoad) -> bool:
        return load.num_used_blocks <= self.settings.low * self._room(load)

    def _room(self, load: PoolLoad) -> int:
        """Blocks that the load can count on: without those that are to be lent, or are not returned yet."""
        return min(load.num_blocks, load.full_blocks - self._target)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _bear(self, trouble: LendingReason, now: float) -> LendingDecision:
        self._calm_since_s = None
        if self._busy_since_s is None:
            self._busy_since_s = now
        self._troubled_s = now
        if not self._target or now - self._busy_since_s < self.settings.busy_s:
            return LendingDecision(self._target)
        self._target, self._offered_rate = 0, self.settings.profiled_rate
        return LendingDecision(0, trouble)

    def _forget_trouble(self, now: float) -> None:
        """Treat trouble that is interrupted for less than ``busy_s`` as one trouble."""
        if now - self._troubled_s >= self.settings.busy_s:
            self._busy_since_s = None

    def _offer(self, spare: int, now: float) -> LendingDecision:
        settings = self.settings
        self._target, self._offered_s = spare, now
        if settings.profiled_rate is None:
            rates = (self._rate_over(now, settings.window_s), self._rate_over(now, settings.rate_window_s))
            self._offered_rate = max(rates)
        return LendingDecision(spare, LendingReason.CALM)

    def _spare_blocks(self, load: PoolLoad) -> int:
        """Blocks to lend so that the recent peak takes ``low`` of the rest, and the profile's peak ``high``."""
        settings = self.settings
        profiled = int((settings.profiled_peak_blocks or 0) / settings.high) + 1  # rounding must not pass ``high``
        kept = max(self._least_blocks, profiled, ceil(self._peaks[0][1] / settings.low))
        spare = max(0, load.full_blocks - kept)
        return spare if self._most_blocks is None else min(spare, self._most_blocks)

    def _least_change(self, load: PoolLoad) -> float:
        return self.settings.least_part * load.full_blocks
