"""Chooses the freest instance for a request, and migrations of running requests, as Llumnix does (OSDI'24). Pure.

Freeness (section 4.4) is an instance's blocks less the demand of all its requests, waiting ones included, divided by
the number of its requests. A request migrates from the instance with the least freeness to the freest one, if the
former is below ``LOW_FREENESS`` and the latter is still at ``HIGH_FREENESS`` or above afterwards: so a target becomes a
source only after its load has grown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

NEARLY = 0.75
"""Part of the best freeness from which on an instance counts as almost as free, so that a known prefix decides."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """Load of an instance when a request is to be placed.

    Attributes:
        epoch: Names the instance; higher ones joined later.
        num_demanded_blocks: Blocks for the known tokens of its running and waiting requests.
        num_known_blocks: Leading blocks of the request that it has probably computed for an earlier one.
        num_choices: Live choices of the same request on it.
    """

    epoch: int
    num_blocks: int
    num_demanded_blocks: int
    num_requests: int
    num_known_blocks: int = 0
    num_choices: int = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request demands; negative if demand exceeds the pool."""
        return self.num_blocks - self.num_demanded_blocks


def freeness(view: InstanceView) -> float:
    """Free blocks per request; if blocks are missing, minus their number, undivided."""
    num_free = view.num_free_blocks
    return num_free / max(1, view.num_requests) if num_free > 0 else float(num_free)


def choose_instance(views: Iterable[InstanceView], num_needed_blocks: int) -> int | None:
    """The epoch of the instance that gets a request of ``num_needed_blocks`` known blocks; None if there is none.

    An instance with other choices of the request is chosen, however busy it is: it computes their prompt once. A known
    prefix decides near ties, if the request fits beside the instance's demand. Other ties go to fewer requests, then to
    the instance that joined first.
    """
    candidates = list(views)
    if not candidates:
        return None
    least = NEARLY * max(map(freeness, candidates))

    def key(view: InstanceView) -> tuple[int, int, float, int, int]:
        is_near = freeness(view) >= least and view.num_free_blocks >= num_needed_blocks
        num_known = view.num_known_blocks if is_near else 0
        return view.num_choices, num_known, freeness(view), -view.num_requests, -view.epoch

    return max(candidates, key=key).epoch


LOW_FREENESS = 8.0
"""Free blocks per request below which an instance is a source."""
HIGH_FREENESS = 16.0
"""Least free blocks per request of the target, the migrated request included."""
COOL_S = 5.0
"""Seconds after the beginning of a migration, even a failed one, before the same request may migrate again."""
MOST_UNDER_WAY = 4
"""Most migrations at the same time: each copies KV, and holds its blocks twice."""


@dataclass(frozen=True, slots=True)
class MovableRequest:
    """A running request that may migrate: the router's number, blocks of its known tokens and the next one.

    ``tried_s``: when its last migration began; None if it never migrated.
    """

    number: int
    num_blocks: int
    tried_s: float | None = None


@dataclass(frozen=True, slots=True)
class MovePlan:
    """One migration to begin: the request's number, and the epochs of both instances."""

    request: int
    source: int
    target: int


def choose_move(
    views: Iterable[InstanceView], requests: Mapping[int, Iterable[MovableRequest]], num_under_way: int, now: float
) -> MovePlan | None:
    """The next migration; None if none is worth it. Call again with the move applied (``apply_move``).

    Args:
        views: Instances that take requests; migrating requests count at their targets.
        requests: By epoch, the running requests there that are not migrating.
        now: Seconds, on the clock of ``tried_s``.
    """
    some = sorted(views, key=lambda view: (freeness(view), view.epoch))
    if len(some) < 2 or num_under_way >= MOST_UNDER_WAY or freeness(some[0]) >= LOW_FREENESS:
        return None
    source, target = some[0], some[-1]
    possible = [one for one in requests.get(source.epoch, ()) if one.tried_s is None or now - one.tried_s >= COOL_S]
    for one in sorted(possible, key=lambda each: (each.num_blocks, each.number)):
        if freeness(apply_move(source, target, one.num_blocks)[1]) >= HIGH_FREENESS:
            return MovePlan(one.number, source.epoch, target.epoch)
    return None


def apply_move(source: InstanceView, target: InstanceView, num_blocks: int) -> tuple[InstanceView, InstanceView]:
    """Views of (source, target) after a request of ``num_blocks`` has migrated."""
    return _add(source, -num_blocks, -1), _add(target, num_blocks, 1)


def _add(view: InstanceView, num_blocks: int, num_requests: int) -> InstanceView:
    return replace(
        view,
        num_demanded_blocks=view.num_demanded_blocks + num_blocks,
        num_requests=view.num_requests + num_requests,
    )
