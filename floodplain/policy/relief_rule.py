"""When layers are dropped and restored, and whether a drop pays: one rule for the router and the simulator. Pure.

``drop_timing`` says when memory is short for long enough, ``relief`` whether a drop costs less than waiting. Rates are
learned from reports of instances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from floodplain.policy.drop import DropSizes
from floodplain.policy.drop_timing import ClusterLoad, DropMoment, DropTiming, DropTimingSettings
from floodplain.policy.relief import (
    LONG_S,
    RECENT_S,
    ArrivalMeter,
    DropCost,
    Lever,
    Offer,
    Overload,
    ReliefDecision,
    StepMeter,
    StreamStep,
    choose_relief,
    expect_s,
)

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
        sizes: Of layers and blocks.
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
        most_stages: The most instances in a group.
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
