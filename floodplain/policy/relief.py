"""What relieves an overload: waiting, turns, streamed layers, or dropped ones. One decision, by price. Pure.

The price is in *token-seconds*: output tokens that wait, times how long, from now until none waits. It is the area
under the line of waiting tokens, which grows by what arrives and falls by what is generated (a lever's rate; nothing in
its pause). Divided by the tokens it is their mean wait, so it is E2E latency and throughput in one number.

By that number turns gain nothing: the same memory makes the same tokens, for whichever requests. They are for goals:
first tokens come early, and silences are bounded. So turns are preferred to waiting as long as their copies cost
little, and levers that make more tokens must gain so much that goals are worth less: in a group, and while all
layers stream, requests are served first come first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

LEAST_GAIN = 1.25
"""Token-seconds of the best lever without more memory, over those of one with more, from which on the latter is taken.

Rates are known to about 5 % (docs/design/017), and small differences of rates make large ones of areas.
"""

TURN_LIMIT = 1.25
"""Token-seconds of turns over those of waiting, at most: so much may goals cost."""

MOST_S = 300.0
"""Seconds that are looked ahead, at most: by then an autoscaler has started another instance."""

CALM_PART = 0.5
"""Part of the streams that are there when layers come back (``DropTimingSettings.low``)."""


class Lever(Enum):
    """A way to serve more requests than memory holds."""

    WAIT = "wait"
    """Requests wait until memory is free; running ones that outgrow it are preempted, the latest first."""
    RECOMPUTE = "recompute"
    """Requests take turns, and each turn computes its KV again."""
    HOST = "host"
    """Requests take turns over swap space in the host's memory."""
    PEER = "peer"
    """Requests take turns over memory that a neighbour lends."""
    EXPAND = "expand"
    """Layers of the KV cache stream from the host (Pie)."""
    DROP = "drop"
    """Instances drop complementary layers, and are a pipeline (KunServe)."""


TURNS = frozenset({Lever.RECOMPUTE, Lever.HOST, Lever.PEER})
MEMORY = frozenset({Lever.EXPAND, Lever.DROP})
"""Levers that give requests more memory."""


class ReliefReason(Enum):
    """Why a lever is chosen."""

    NOTHING_WAITS = "no request waits for memory"
    NO_LEVER = "no lever costs less than waiting"
    GOALS = "turns keep goals, and more memory would gain too little"
    MORE_TOKENS = "more requests at once make more tokens"


@dataclass(frozen=True, slots=True)
class Overload:
    """More requests than memory holds. Tokens are output tokens.

    Attributes:
        waiting_tokens: That the waiting requests will generate.
        resident_tokens: That requests in memory still have to generate.
        arriving_tokens_per_s: That arrive now, as requests.
        later_tokens_per_s: That arrive when the burst is over.
        lasts_s: Seconds for which the burst is expected to last.
    """

    waiting_tokens: float
    resident_tokens: float
    arriving_tokens_per_s: float
    later_tokens_per_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """A lever, and what it would do here.

    Attributes:
        lever: Which.
        tokens_per_s: Generated while requests wait.
        pause_s: For which nothing is generated, at first.
        undo_s: The same when the overload is over.
    """

    lever: Lever
    tokens_per_s: float
    pause_s: float = 0.0
    undo_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReliefDecision:
    """The lever to use.

    Attributes:
        lever: Of the offers, or WAIT.
        reason: Why.
        prices: Token-seconds of each offer.
    """

    lever: Lever
    reason: ReliefReason
    prices: Mapping[Lever, float]


def expect_s(lasted_s: float, least_s: float = 1.0) -> float:
    """How long an overload will last of which only is known how long it has: as long again (Gott's rule, median)."""
    return max(least_s, lasted_s)


def token_seconds(overload: Overload, offer: Offer) -> float:
    """What an offer costs; see the module. Looks ``MOST_S`` ahead, and what waits then has waited so long.

    Args:
        overload: What waits and what comes.
        offer: A lever.
    """
    waiting, area, now = overload.waiting_tokens, 0.0, 0.0
    burst_s = min(overload.lasts_s, MOST_S)
    ends = sorted({min(offer.pause_s, MOST_S), burst_s, MOST_S})
    for end in ends:
        arriving = overload.arriving_tokens_per_s if now < burst_s else overload.later_tokens_per_s
        generated = offer.tokens_per_s if now >= offer.pause_s else 0.0
        waiting, more = _let_pass(waiting, arriving - generated, end - now)
        area += more
        now = end
    return area + offer.undo_s * CALM_PART * overload.resident_tokens


def choose_relief(overload: Overload, offers: Iterable[Offer]) -> ReliefDecision:
    """The lever with the fewest token-seconds, but for the preferences of the module.

    Args:
        overload: What waits and what comes.
        offers: What is possible here; WAIT is one of them.
    """
    prices = {offer.lever: token_seconds(overload, offer) for offer in offers}
    waited = prices[Lever.WAIT]
    if overload.waiting_tokens <= 0 or waited <= 0:
        return ReliefDecision(Lever.WAIT, ReliefReason.NOTHING_WAITS, prices)
    turn = _cheapest(prices, TURNS)
    plain = turn if turn is not None and prices[turn] <= TURN_LIMIT * waited else Lever.WAIT
    larger = _cheapest(prices, MEMORY)
    if larger is not None and LEAST_GAIN * prices[larger] <= prices[plain]:
        return ReliefDecision(larger, ReliefReason.MORE_TOKENS, prices)
    return ReliefDecision(plain, ReliefReason.NO_LEVER if plain is Lever.WAIT else ReliefReason.GOALS, prices)


def _cheapest(prices: Mapping[Lever, float], levers: Iterable[Lever]) -> Lever | None:
    """Ties go to the lever that stands last in ``Lever``: of two kinds of turns to the faster link."""
    order = list(Lever)
    possible = [lever for lever in levers if lever in prices]
    return min(possible, key=lambda lever: (prices[lever], -order.index(lever)), default=None)


def _let_pass(waiting: float, rise: float, seconds: float) -> tuple[float, float]:
    """What waits after so many seconds in which it rises at a rate, and the area below it. It does not fall below 0."""
    if waiting + rise * seconds >= 0:
        return waiting + rise * seconds, (waiting + rise * seconds / 2) * seconds
    return 0.0, waiting * waiting / (-2 * rise)
