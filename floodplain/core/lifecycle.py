"""The event list of a request. TTFT, TPOT, ITL and E2E (``docs/metrics.md``) are derived here and nowhere else.

All times are seconds on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from floodplain.core.errors import InvariantError
from floodplain.core.plan import TransferKind
from floodplain.core.request import FinishReason, Request
from floodplain.core.tiers import Tier


class EventKind(Enum):
    """Kinds of events of a request, except for tokens."""

    ARRIVED = "arrived"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    SWAPPED_IN = "swapped_in"
    FINISHED = "finished"


def time_to_first_token_s(arrival_s: float, token_times_s: Sequence[float]) -> float | None:
    """TTFT: first token - arrival; None while there is no token."""
    return token_times_s[0] - arrival_s if token_times_s else None


def inter_token_latencies_s(token_times_s: Sequence[float]) -> list[float]:
    """ITL: every single gap between tokens that follow each other."""
    return [b - a for a, b in pairwise(token_times_s)]


def time_per_output_token_s(token_times_s: Sequence[float]) -> float | None:
    """TPOT: the mean gap after the first token, (last - first) / (tokens - 1); None below two tokens."""
    if len(token_times_s) < 2:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)


def end_to_end_s(arrival_s: float, token_times_s: Sequence[float]) -> float | None:
    """E2E: last token - arrival; None while there is no token."""
    return token_times_s[-1] - arrival_s if token_times_s else None


@dataclass(slots=True)
class Lifecycle:
    """Events (time, kind) and token times of one request, in order; times never decrease.

    ``num_cached_tokens``: prompt tokens that were not computed: found on the device, or fetched from swap space.
    ``num_swapped_blocks``: by an event's place in ``events``, the KV blocks that a preemption left in swap space, or
    that a swap-in copied. A preemption without an entry dropped the KV, to be recomputed.
    """

    arrival_s: float
    events: list[tuple[float, EventKind]] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_swapped_blocks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events.append((self.arrival_s, EventKind.ARRIVED))

    def record(self, kind: EventKind, now: float, num_swapped_blocks: int = 0) -> None:
        """Append an event, with the KV blocks that it moved to or from swap space."""
        if num_swapped_blocks:
            self.num_swapped_blocks[len(self.events)] = num_swapped_blocks
        self.events.append((now, kind))

    def first(self, kind: EventKind) -> float | None:
        """When ``kind`` happened first, or None."""
        return next((when for when, what in self.events if what is kind), None)

    @property
    def queueing_delay_s(self) -> float | None:
        """First scheduled - arrival; None while it waits."""
        scheduled = self.first(EventKind.SCHEDULED)
        return None if scheduled is None else scheduled - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """First token - first scheduled; None before both are known."""
        scheduled = self.first(EventKind.SCHEDULED)
        return self.token_times_s[0] - scheduled if scheduled is not None and self.token_times_s else None

    @property
    def decode_s(self) -> float | None:
        """Last token - first token; None below two tokens."""
        return self.token_times_s[-1] - self.token_times_s[0] if len(self.token_times_s) > 1 else None

    @property
    def inference_s(self) -> float | None:
        """Last token - first scheduled; None before both are known."""
        scheduled = self.first(EventKind.SCHEDULED)
        return self.token_times_s[-1] - scheduled if scheduled is not None and self.token_times_s else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return time_to_first_token_s(self.arrival_s, self.token_times_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token."""
        return time_per_output_token_s(self.token_times_s)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies."""
        return inter_token_latencies_s(self.token_times_s)

    @property
    def e2e_s(self) -> float | None:
        """End-to-end latency."""
        return end_to_end_s(self.arrival_s, self.token_times_s)


def residence_s(lifecycle: Lifecycle) -> list[tuple[float, float]]:
    """When the request was on the device: (start, end) of each stay that has ended, in order and disjoint.

    A stay begins when a waiting request is scheduled or its KV has arrived, and ends when it is preempted or finished.
    Stays that took no time are left out. InvariantError if events contradict each other.
    """
    stays: list[tuple[float, float]] = []
    since_s: float | None = None
    for now, kind in lifecycle.events:
        comes = kind in (EventKind.SCHEDULED, EventKind.SWAPPED_IN)
        if (comes and since_s is not None) or (kind is EventKind.PREEMPTED and since_s is None):
            raise InvariantError(f"a request is {kind.value} at {now} s, but {'on' if comes else 'off'} the device")
        if comes:
            since_s = now
        elif since_s is not None:
            if now > since_s:
                stays.append((since_s, now))
            since_s = None
    return stays


@dataclass(frozen=True, slots=True)
class CopiedKV:
    """A copy of a request's KV between the device and one tier of swap space, from its order to its end."""

    kind: TransferKind
    tier: Tier
    num_bytes: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request, its events and why it ended; ``copies`` by their ends, empty unless the engine records them."""

    request: Request
    lifecycle: Lifecycle
    reason: FinishReason
    copies: tuple[CopiedKV, ...] = ()


OnFirstToken = Callable[[Request, Lifecycle], None]
"""Called with a request that has its first token."""
