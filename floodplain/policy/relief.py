"""Chooses what relieves an overload, by price: waiting, turns, streamed layers, or dropped layers. Pure.

The price is in *token-seconds*: waiting output tokens times the time that they wait, until none waits. It is the area
under the curve of waiting tokens, which rises with arrivals and falls with generation (at a lever's rate; not during
its pause). Divided by the tokens it is their mean wait, so it covers E2E latency and throughput in one number.

By that price turns gain nothing: the same memory generates the same tokens. Turns serve goals: first tokens are early,
and silences are bounded. So turns are preferred to waiting while their copies cost little, and levers with more memory
must gain enough to outweigh goals: in a group, and while all layers stream, requests are served by FCFS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

LEAST_GAIN = 1.25
"""A lever with more memory is chosen if the best one without costs at least so many times its token-seconds.

Rates are known to about 5 % (docs/design/019), and small differences of rates make large ones of areas.
"""

TURN_LIMIT = 1.25
"""Most ratio of the token-seconds of turns and of waiting: the price that goals may have."""

MOST_S = 300.0
"""Longest time in seconds that is predicted: by then an autoscaler has started another instance."""

CALM_PART = 0.5
"""Part of the streams that are live when layers are restored (``DropTimingSettings.low``)."""


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
        waiting_tokens: Tokens that the waiting requests will generate.
        resident_tokens: Tokens that requests in memory still have to generate.
        arriving_tokens_per_s: Arrival rate during the burst.
        later_tokens_per_s: Arrival rate after the burst.
        lasts_s: Seconds for which the burst is expected to last.
    """

    waiting_tokens: float
    resident_tokens: float
    arriving_tokens_per_s: float
    later_tokens_per_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """A lever and its predicted effect.

    Attributes:
        lever: The lever.
        tokens_per_s: Tokens generated per second while requests wait.
        pause_s: Seconds at the start in which no token is generated.
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
    """Expected seconds that an overload still lasts: as long as it has lasted (Gott's rule, median)."""
    return max(least_s, lasted_s)


def token_seconds(overload: Overload, offer: Offer) -> float:
    """The price of an offer in token-seconds, over the next ``MOST_S`` seconds and its undo pause.

    Args:
        overload: Waiting and arriving tokens.
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
    """Choose the lever with the fewest token-seconds, subject to ``TURN_LIMIT`` and ``LEAST_GAIN``.

    Args:
        overload: Waiting and arriving tokens.
        offers: The possible levers; WAIT is one of them.
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
    """The cheapest offered lever of ``levers``; ties go to the last in ``Lever``, the faster link."""
    order = list(Lever)
    possible = [lever for lever in levers if lever in prices]
    return min(possible, key=lambda lever: (prices[lever], -order.index(lever)), default=None)


def _let_pass(waiting: float, rise: float, seconds: float) -> tuple[float, float]:
    """(tokens that wait after ``seconds`` at rate ``rise`` per second, at least 0; area under that line)."""
    if waiting + rise * seconds >= 0:
        return waiting + rise * seconds, (waiting + rise * seconds / 2) * seconds
    return 0.0, waiting * waiting / (-2 * rise)
