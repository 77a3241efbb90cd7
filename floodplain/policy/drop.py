"""Which instances drop layers together, by the fewest, most even merges that suffice; and when. Pure (docs/design/019).

Merging two groups frees one copy of all layers, whatever their sizes, and the longest group is the slowest (KunServe,
section 4.1). So the need gives the number of merges, and *longest processing time first* the balance. Each merge
contains an overloaded group, and calm groups only as its partners.

*Drop*: for a while, requests at heads of lines needed more blocks than are free, and the shortage is predicted to last
longer than a drop takes, by a straight line through the demand of the last window, extended by one window. *Restore*:
for a longer while, demand took less than half of the undropped pools.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from floodplain.core.errors import InvariantError

MOST_STAGES = 4
"""Default for the most instances in a group: each one more makes bubbles larger and microbatches smaller."""


@dataclass(frozen=True, slots=True)
class DropSizes:
    """Sizes of a layer's parameters, of a block in one layer, and of a quantum, alike in each instance."""

    num_layers: int
    layer_bytes: int
    block_bytes: int
    quantum_blocks: int = 1

    @property
    def copy_blocks(self) -> float:
        """Blocks that fit into the memory of one copy of all layers: the most that a merge frees."""
        return self.layer_bytes / self.block_bytes

    def group_blocks(self, pool_blocks: Sequence[int]) -> int:
        """Blocks of a group's pool, limited by the smallest member: a block needs room in all members.

        ``pool_blocks`` is the KV pool of each member while it has all layers. The largest part of an even cut counts
        for each member; an uneven cut has fewer blocks.
        """
        num_kept = -(-self.num_layers // len(pool_blocks))
        dropped_bytes = (self.num_layers - num_kept) * self.layer_bytes
        num_bytes = min(pool_blocks) * self.num_layers * self.block_bytes + dropped_bytes
        quantum_bytes = num_kept * self.block_bytes * self.quantum_blocks
        return num_bytes // quantum_bytes * self.quantum_blocks if dropped_bytes else pool_blocks[0]


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A group of instances, or a single instance, and the demand of its requests.

    ``pool_blocks`` is the KV pool of each member while it has all layers. Demand counts blocks for the tokens of
    running requests and of those at the head of the line.
    """

    epochs: tuple[int, ...]
    pool_blocks: tuple[int, ...]
    num_demanded_blocks: int

    @property
    def num_stages(self) -> int:
        """Number of members."""
        return len(self.epochs)


@dataclass(frozen=True, slots=True)
class DropPlan:
    """The groups that each new group merges, two or more, and the blocks that are gained in sum."""

    merges: tuple[tuple[GroupLoad, ...], ...]
    num_gained_blocks: int

    @property
    def longest(self) -> int:
        """Stages of the longest new group."""
        return max(map(count_stages, self.merges), default=0)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The members of each new group, those of one part beside each other."""
        return tuple(tuple(epoch for part in parts for epoch in part.epochs) for parts in self.merges)


def count_stages(parts: Iterable[GroupLoad]) -> int:
    """Number of stages of the group that merges these."""
    return sum(part.num_stages for part in parts)


def excess_blocks(load: GroupLoad, sizes: DropSizes) -> int:
    """Demanded blocks beyond the group's pool; negative if blocks are free."""
    return load.num_demanded_blocks - sizes.group_blocks(load.pool_blocks)


def plan_drop(
    loads: Sequence[GroupLoad], need_blocks: int, sizes: DropSizes, most_stages: int = MOST_STAGES
) -> DropPlan | None:
    """The plan with the fewest merges that gains ``need_blocks``; None if none does, or if nothing is needed.

    If none is overloaded yet, all groups count as overloaded. ``loads``: all that may take part, single instances too.
    """
    if need_blocks <= 0:
        return None
    overloaded, calm = _rank(loads, sizes)
    most_stages = min(most_stages, sizes.num_layers)
    low, high = _fewest_merges(loads, need_blocks, sizes), len(loads) - 1
    found: DropPlan | None = None
    middle = low
    while low <= high:
        plan = _plan_merges(overloaded, calm, middle, sizes)
        if plan.longest > most_stages:
            high = middle - 1
        elif plan.num_gained_blocks >= need_blocks:
            found, high = plan, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    return found


def plan_largest(loads: Sequence[GroupLoad], sizes: DropSizes, most_stages: int = MOST_STAGES) -> DropPlan | None:
    """The plan within ``most_stages`` that gains most, for a need that no plan covers; None if none gains."""
    overloaded, calm = _rank(loads, sizes)
    low, high = 1, len(loads) - 1
    found: DropPlan | None = None
    while low <= high:
        middle = (low + high) // 2
        plan = _plan_merges(overloaded, calm, middle, sizes)
        if plan.longest > min(most_stages, sizes.num_layers):
            high = middle - 1
        else:
            low = middle + 1
            if plan.num_gained_blocks > (found.num_gained_blocks if found is not None else 0):
                found = plan
    return found


def _rank(loads: Sequence[GroupLoad], sizes: DropSizes) -> tuple[list[GroupLoad], list[GroupLoad]]:
    """Overloaded groups, the most overloaded first, and calm ones, the best partner first."""
    ranked = sorted(loads, key=lambda load: (-excess_blocks(load, sizes), load.epochs))
    num_overloaded = sum(excess_blocks(load, sizes) > 0 for load in ranked) or len(ranked)
    calm = sorted(ranked[num_overloaded:], key=lambda load: (load.num_stages, excess_blocks(load, sizes), load.epochs))
    return ranked[:num_overloaded], calm


def _fewest_merges(loads: Iterable[GroupLoad], need_blocks: int, sizes: DropSizes) -> int:
    """Lower bound of the merges: each gains at most one copy, plus what groups lost by rounding before."""
    ideal_blocks = (sum(load.pool_blocks) + (load.num_stages - 1) * sizes.copy_blocks for load in loads)
    lost_blocks = sum(ideal_blocks) - sum(sizes.group_blocks(load.pool_blocks) for load in loads)
    return max(1, math.ceil((need_blocks - lost_blocks) / sizes.copy_blocks - 1e-9))


def _plan_merges(
    overloaded: Sequence[GroupLoad], calm: Sequence[GroupLoad], num_merges: int, sizes: DropSizes
) -> DropPlan:
    """The most even plan of ``num_merges``, none of calm groups alone; both lists come with the best to merge first."""
    partners = calm[:num_merges]
    num_bins = len(overloaded) + len(partners) - num_merges
    longest_first = sorted([*overloaded, *partners], key=lambda load: -load.num_stages)
    bins = [[load] for load in longest_first[:num_bins]]
    heap = [(load.num_stages, index) for index, load in enumerate(longest_first[:num_bins])]
    heapq.heapify(heap)
    for load in longest_first[num_bins:]:
        num_stages, index = heap[0]
        bins[index].append(load)
        heapq.heapreplace(heap, (num_stages + load.num_stages, index))
    needy = {load.epochs for load in overloaded}
    merges = tuple(tuple(p) for p in bins if len(p) > 1 and any(load.epochs in needy for load in p))
    return DropPlan(merges, sum(_gain(parts, sizes) for parts in merges))


def _gain(parts: Sequence[GroupLoad], sizes: DropSizes) -> int:
    pool_blocks = [blocks for part in parts for blocks in part.pool_blocks]
    return sizes.group_blocks(pool_blocks) - sum(sizes.group_blocks(part.pool_blocks) for part in parts)


class DropMove(Enum):
    """A change of the cluster's groups."""

    STAY = "stay"
    """Change nothing."""
    DROP = "drop"
    """Plan a drop that gains the missing blocks, and carry it out."""
    RESTORE = "restore"
    """Split every group into single instances again."""


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Load of all instances at one moment.

    Attributes:
        now: Seconds of any monotonic clock.
        num_used_blocks: Blocks that running requests hold.
        num_head_blocks: Blocks that the waiting requests at heads of lines need; 0 if none waits.
        num_blocks: Blocks of all pools, as they are now, and
        undropped_blocks: if no layer is dropped.
        is_changing: Whether a transition is under way: no move is made before it ends.
    """

    now: float
    num_used_blocks: int
    num_head_blocks: int
    num_blocks: int
    undropped_blocks: int
    is_grouped: bool = False
    is_changing: bool = False

    @property
    def num_demanded_blocks(self) -> int:
        """Blocks of running requests and of the heads of lines."""
        return self.num_used_blocks + self.num_head_blocks

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that the heads of lines need beyond what is free; not above 0 if these fit."""
        return self.num_demanded_blocks - self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTimingSettings:
    """Times and limits of drops and restores.

    Attributes:
        overload_s: Seconds for which the head of the line did not fit before a drop.
        window_s: Seconds of demand that the prediction is fitted to, and by which it is extended.
        low: Part of the undropped pools below which demand allows a restore.
        calm_s: Seconds for which demand must stay below that part.
        most_drops: Drops between two restores; each after the first one merges groups.
    """

    overload_s: float = 0.5
    window_s: float = 5.0
    low: float = 0.5
    calm_s: float = 10.0
    gap_s: float = 10.0
    most_drops: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.low < 1 and self.most_drops >= 1 and min(self.overload_s, self.calm_s, self.gap_s) >= 0):
            raise InvariantError(f"low lies between 0 and 1, a drop is allowed, times are not negative: {self}")
        if not 0 <= self.overload_s < self.window_s:
            raise InvariantError(f"a window is longer than the overload that it shows: {self}")


@dataclass(frozen=True, slots=True)
class DropMoment:
    """A decision about drops.

    ``need_blocks`` of a drop: the larger of the blocks missing now and those predicted to be. ``lasts_s``: seconds for
    which blocks are predicted to be missing; inf if demand does not fall.
    """

    move: DropMove = DropMove.STAY
    need_blocks: int = 0
    lasts_s: float = 0.0


class DropTiming:
    """Decides when to drop and restore. A move that was not carried out may be decided again after a gap."""

    def __init__(self, settings: DropTimingSettings = DropTimingSettings()) -> None:
        self.settings = settings
        self._demands: deque[tuple[float, int]] = deque()
        self._short_since_s: float | None = None
        self._calm_since_s: float | None = None
        self._moved_s = -inf
        self._num_drops = 0

    def decide(self, load: ClusterLoad, transition_s: float) -> DropMoment:
        """The move under this load (in order of ``load.now``), if a drop would take ``transition_s`` seconds now."""
        self._note(load)
        if load.is_changing or load.now - self._moved_s < self.settings.gap_s:
            return DropMoment()
        if load.is_grouped and _has_lasted(self._calm_since_s, load.now, self.settings.calm_s):
            return self._move(load, DropMoment(DropMove.RESTORE))
        can_drop = not load.is_grouped or 0 < self._num_drops < self.settings.most_drops
        if can_drop and _has_lasted(self._short_since_s, load.now, self.settings.overload_s):
            moment = self._predict(load)
            if moment.lasts_s > transition_s:
                return self._move(load, moment)
        return DropMoment()

    def _note(self, load: ClusterLoad) -> None:
        while self._demands and self._demands[0][0] < load.now - self.settings.window_s:
            self._demands.popleft()
        self._demands.append((load.now, load.num_demanded_blocks))
        is_short = load.num_head_blocks > 0 and load.num_missing_blocks > 0
        is_calm = load.num_demanded_blocks < self.settings.low * load.undropped_blocks
        self._short_since_s = _first_seen(self._short_since_s, is_short and not load.is_changing, load.now)
        self._calm_since_s = _first_seen(self._calm_since_s, is_calm and not load.is_changing, load.now)
        if not (load.is_grouped or load.is_changing):
            self._num_drops = 0

    def _predict(self, load: ClusterLoad) -> DropMoment:
        slope = find_slope(self._demands)
        missing = load.num_missing_blocks
        lasts_s = missing / -slope if slope < 0 else inf
        ahead = round(missing + slope * self.settings.window_s)
        return DropMoment(DropMove.DROP, max(missing, ahead), lasts_s)

    def _move(self, load: ClusterLoad, moment: DropMoment) -> DropMoment:
        self._moved_s = load.now
        self._num_drops = self._num_drops + 1 if moment.move is DropMove.DROP else 0
        self._short_since_s = self._calm_since_s = None
        return moment


def find_slope(points: Iterable[tuple[float, float]]) -> float:
    """Least-squares slope of the second number over the first one; 0 for a single point."""
    points = list(points)
    middle = sum(x for x, _ in points) / len(points)
    level = sum(y for _, y in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * (y - level) for x, y in points) / spread if spread > 0 else 0.0


def _first_seen(since_s: float | None, is_seen: bool, now: float) -> float | None:
    return (now if since_s is None else since_s) if is_seen else None


def _has_lasted(since_s: float | None, now: float, seconds: float) -> bool:
    return since_s is not None and now - since_s >= seconds
