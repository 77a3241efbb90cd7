"""Plans which instances drop layers together: the fewest, most even merges that suffice. Pure.

Merging two groups frees one copy of all layers, whatever their sizes; each request then runs through all stages of the
new group, and the longest group is the slowest (KunServe, section 4.1). So the number of merges follows from the need,
and the rest is balance: *longest processing time first* into as many bins as groups are left. The paper merges the two
smallest groups again and again (Algorithm 6), which leaves longer groups.

Memory helps where requests wait: each merge contains an overloaded group, and calm groups only as its partners.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_STAGES = 4
"""Default for the most instances in a group: each one more makes bubbles larger and microbatches smaller."""


@dataclass(frozen=True, slots=True)
class DropSizes:
    """Sizes of parameters (of one layer) and KV (of a block in one layer) in each instance.

    ``quantum_blocks`` are mapped together.
    """

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

        ``pool_blocks`` is the KV pool of each member while it has all layers. Layers are cut evenly, and the largest
        part counts for each member; an uneven cut has fewer blocks.
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
    def num_merges(self) -> int:
        """Copies of the layers that are dropped."""
        return sum(len(parts) - 1 for parts in self.merges)

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

    With one merge fewer the same rule gains too little. If no group is overloaded yet, all groups count as overloaded.
    ``loads`` are all groups that may take part, single instances included.
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
    """The most even plan of ``num_merges`` (fewer than groups), without merges that contain no overloaded group.

    Overloaded groups come with the most overloaded first, calm ones with the best partner first.
    """
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
    if len(parts) == 1:
        return 0
    pool_blocks = [blocks for part in parts for blocks in part.pool_blocks]
    return sizes.group_blocks(pool_blocks) - sum(sizes.group_blocks(part.pool_blocks) for part in parts)
