"""Chooses what relieves an overload, by price: waiting, turns, streamed layers, or dropped layers. Pure.

Parts: tokens per second and initial cost of each lever; the choice; rates learned from reports of instances.

The price is in *token-seconds*: waiting output tokens times the time that they wait, until none waits. It is the area
under the curve of waiting tokens, which rises with arrivals and falls with generation (at a lever's rate; not during
its pause). By that price turns gain nothing: they serve goals. So turns are preferred to waiting while their copies
cost little, and levers with more memory, under which requests are served by FCFS, must gain enough to outweigh goals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from floodplain.policy.drop import ClusterLoad, DropMoment, DropSizes, DropTiming, DropTimingSettings, find_slope

EVEN_BUBBLE = {1: 0.0, 2: 0.02, 3: 0.04, 4: 0.055}
"""Idle share of the stages' time with microbatches of equal cost (docs/design/017); uneven layers add to it."""

EXCHANGE_LOSS = 0.5
"""Share of tokens lost during an exchange: handed-over requests wait, new ones run."""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The time of a step by its number of streams, in seconds.

    Attributes:
        base_s: Of any step.
        token_s: For each stream: its decode, and the prompt tokens per output token.
        prompt_token_s: For each token of a prompt.
    """

    base_s: float
    token_s: float
    prompt_token_s: float = 0.0

    def tokens_per_s(self, num_streams: float) -> float:
        """Output tokens per second of an instance with ``num_streams`` streams in memory."""
        return num_streams / (self.base_s + num_streams * self.token_s)

    def pipeline_tokens_per_s(
        self, num_streams: float, num_stages: int, hop_s: float = 0.0, bubble: float | None = None
    ) -> float:
        """Output tokens per second of a pipeline: each stage has a share of the layers, and of the streams at a time.

        ``num_streams`` are in the memory of the group. Hops take ``hop_s`` seconds; ``bubble`` is the idle share of the
        stages' time, None: that of equal stages.
        """
        idle = EVEN_BUBBLE.get(num_stages, max(EVEN_BUBBLE.values())) if bubble is None else bubble
        cycle_s = self.base_s + num_streams / num_stages * self.token_s + num_stages * hop_s
        return num_streams / cycle_s * (1 - idle)


@dataclass(frozen=True, slots=True)
class DropCost:
    """The cost of a drop before it gains.

    Attributes:
        remap_s: Seconds for which members are paused to unmap and map pages.
        exchange_bytes: KV that each member sends, all members at once.
        bandwidth: Bytes per second of the link between members.
    """

    remap_s: float
    exchange_bytes: float
    bandwidth: float

    @property
    def exchange_s(self) -> float:
        """Seconds until the last request that was handed over runs again."""
        return self.exchange_bytes / self.bandwidth

    @property
    def pause_s(self) -> float:
        """The cost of a drop in seconds of lost tokens."""
        return self.remap_s + EXCHANGE_LOSS * self.exchange_s


def exchanged_bytes(kv_bytes: float, num_stages: int) -> float:
    """KV that a member sends in a drop: the layers of its KV that the other members keep."""
    return kv_bytes * (num_stages - 1) / num_stages


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
    """A lever, its rate while requests wait, and seconds without tokens at its start and when the overload is over."""

    lever: Lever
    tokens_per_s: float
    pause_s: float = 0.0
    undo_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReliefDecision:
    """The lever to use (of the offers, or WAIT), why, and the token-seconds of each offer."""

    lever: Lever
    reason: ReliefReason
    prices: Mapping[Lever, float]


def expect_s(lasted_s: float) -> float:
    """Expected seconds that an overload still lasts: as long as it has lasted (Gott's rule, median), at least 1."""
    return max(1.0, lasted_s)


def token_seconds(overload: Overload, offer: Offer) -> float:
    """The price of an offer in token-seconds, over the next ``MOST_S`` seconds and its undo pause."""
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
    """Choose the lever with the fewest token-seconds, subject to ``TURN_LIMIT`` and ``LEAST_GAIN``; WAIT is offered."""
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


MOST_SAMPLES = 600
"""Most intervals, of all instances, from which a step's time is learned: a minute of two instances."""

BLIND_BASE = 0.5
"""Assumed part of a step's time that does not depend on streams, while all steps seen have about one size."""

LEAST_SPREAD, LEAST_SAMPLES = 1.5, 20
"""Least ratio of most to fewest streams, and least number of samples, for a line through the samples."""

RECENT_S, LONG_S = 5.0, 120.0
"""Windows for arrivals now, and in the long run."""

MOST_ARRIVALS = 10_000
FIRST_OUTPUT_TOKENS = 128.0
"""Assumed output tokens of a request while none has ended."""

FORGETTING = 0.05
"""Weight of the last request's output in the mean."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of an instance at one moment: steps and output tokens since its start, and requests in memory."""

    now: float
    num_steps: int
    num_tokens: int
    num_running: int


class StepMeter:
    """Learns the time of a step from the differences of two reports between which an instance was busy."""

    def __init__(self) -> None:
        self._last: dict[int, Progress] = {}
        self._samples: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)

    def note(self, instance: int, progress: Progress) -> None:
        """Add a report. If counters fell, the instance was restarted: the report only starts a new interval."""
        last = self._last.get(instance)
        self._last[instance] = progress
        if last is None or not (last.num_running and progress.num_running):
            return
        num_steps, num_tokens = progress.num_steps - last.num_steps, progress.num_tokens - last.num_tokens
        if num_steps > 0 and num_tokens > 0:
            self._samples.append((num_tokens / num_steps, (progress.now - last.now) / num_steps))

    def forget(self, instance: int) -> None:
        """Drop the last report of an instance that has ended or joined a group."""
        self._last.pop(instance, None)

    def step(self) -> StreamStep | None:
        """The time of a step as a function of its streams; None without samples."""
        if not self._samples:
            return None
        streams = [one for one, _ in self._samples]
        mean_streams = sum(streams) / len(streams)
        mean_s = sum(seconds for _, seconds in self._samples) / len(self._samples)
        token_s = (1 - BLIND_BASE) * mean_s / mean_streams
        if len(streams) >= LEAST_SAMPLES and max(streams) >= LEAST_SPREAD * min(streams):
            token_s = min(max(0.0, find_slope(self._samples)), mean_s / mean_streams)
        return StreamStep(base_s=mean_s - token_s * mean_streams, token_s=token_s)


class ArrivalMeter:
    """Learns the arrival rate of requests, in output tokens per second."""

    def __init__(self) -> None:
        self.output_tokens = FIRST_OUTPUT_TOKENS
        """Mean output tokens of recently ended requests."""
        self._arrivals: deque[float] = deque(maxlen=MOST_ARRIVALS)
        self._begun_s: float | None = None

    def note_arrival(self, now: float) -> None:
        """Count an arrival."""
        self._begun_s = now if self._begun_s is None else self._begun_s
        self._arrivals.append(now)

    def note_end(self, num_output_tokens: int) -> None:
        """Learn from the output of a request that ended."""
        self.output_tokens += FORGETTING * (num_output_tokens - self.output_tokens)

    def tokens_per_s(self, now: float, window_s: float) -> float:
        """Output tokens that arrived per second in the last ``window_s``, or since the first request."""
        seen_s = min(window_s, now - (now if self._begun_s is None else self._begun_s))
        count = sum(arrival > now - window_s for arrival in self._arrivals)
        return count / max(seen_s, 1.0) * self.output_tokens


MOST_DROPS = 2
"""Most drops between two restores if a drop need not pay: the second merges groups. The price of a merge is unknown."""


def timing_of(settings: DropTimingSettings, *, is_priced: bool) -> DropTimingSettings:
    """The settings of a rule with or without prices: without, groups may merge."""
    return settings if is_priced else replace(settings, most_drops=MOST_DROPS)


@dataclass(frozen=True, slots=True)
class ReliefLoad:
    """A cluster at one moment.

    Attributes:
        blocks: Its demand and its pools.
        own_blocks: Of each instance that takes requests, alone or as a group's leader: its pool with all layers.
        num_running: Requests on the devices of these.
        num_absent: Live requests that are on no device.
        drop_cost: The cost of a drop by the number of instances in a group.
    """

    blocks: ClusterLoad
    own_blocks: tuple[int, ...]
    num_running: int
    num_absent: int
    sizes: DropSizes
    drop_cost: Callable[[int], DropCost]


@dataclass(frozen=True, slots=True)
class Priced:
    """A decision by price, and what it was made from."""

    decision: ReliefDecision
    overload: Overload
    step: StreamStep


class ReliefRule:
    """Decides when to drop and to restore layers. Equal loads and reports in equal order give equal decisions.

    Attributes:
        is_priced: True: a drop must pay; False: it happens whenever memory is short.
        arrivals: Meter of requests, which the caller updates.
        steps: Meter of steps, which the caller updates.
        priced: The last decision by price; None if there was none.
        short_since_s: When memory became short; None if it is not.
    """

    def __init__(self, settings: DropTimingSettings, *, is_priced: bool, most_stages: int) -> None:
        self.arrivals, self.steps = ArrivalMeter(), StepMeter()
        self.priced: Priced | None = None
        self.short_since_s: float | None = None
        self.is_priced, self.most_stages = is_priced, most_stages
        self._timing = DropTiming(settings)

    def decide(self, load: ReliefLoad) -> DropMoment:
        """The move to make under this load; in order of its time."""
        blocks = load.blocks
        is_short = blocks.num_head_blocks > 0 and blocks.num_missing_blocks > 0
        self.short_since_s = (self.short_since_s or blocks.now) if is_short else None
        pays = not is_short or blocks.is_grouped or not self.is_priced or self._pays(load)
        if not pays:
            return self._timing.decide(blocks, inf)
        cost = load.drop_cost(min(self.most_stages, max(2, len(load.own_blocks))))
        return self._timing.decide(blocks, cost.remap_s + cost.exchange_s)

    def _pays(self, load: ReliefLoad) -> bool:
        step, num_heads = self.steps.step(), len(load.own_blocks)
        if step is None or num_heads < 2 or not load.num_running:
            return False
        num_running = load.num_running / num_heads
        num_stages = min(self.most_stages, num_heads)
        pools = load.own_blocks[:num_stages]
        grown = load.sizes.group_blocks(pools) / sum(pools)
        rate = num_heads * step.tokens_per_s(num_running)
        num_groups = num_heads / num_stages
        pipelined = num_groups * step.pipeline_tokens_per_s(grown * num_stages * num_running, num_stages)
        cost, overload = load.drop_cost(num_stages), self._find_overload(load, rate)
        offers = [Offer(Lever.WAIT, rate), Offer(Lever.HOST, rate)]
        offers.append(Offer(Lever.DROP, pipelined, cost.pause_s, cost.remap_s))
        self.priced = Priced(choose_relief(overload, offers), overload, step)
        return self.priced.decision.lever is Lever.DROP

    def _find_overload(self, load: ReliefLoad, rate: float) -> Overload:
        now, output = load.blocks.now, self.arrivals.output_tokens
        return Overload(
            waiting_tokens=load.num_absent * output,
            resident_tokens=load.num_running * output / 2,
            arriving_tokens_per_s=self.arrivals.tokens_per_s(now, RECENT_S),
            later_tokens_per_s=min(self.arrivals.tokens_per_s(now, LONG_S), rate),
            lasts_s=expect_s(now - (self.short_since_s or now)),
        )
