"""Which running request moves where, with its KV: Llumnix's rescheduling (OSDI'24, sections 4.2 and 4.4). Pure.

A request leaves the instance with the least freeness (``policy.dispatch``) for the freest one, if the former is below
``LOW_FREENESS`` and the latter is still above ``HIGH_FREENESS`` afterwards. So an instance that was given a request is
no source before its own load has grown, and requests do not move to and fro under a constant load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from floodplain.policy.dispatch import InstanceView, freeness

LOW_FREENESS = 8.0
"""Free blocks for each request below which an instance gives requests away."""
HIGH_FREENESS = 16.0
"""Free blocks for each request that the target has with the request, at least."""
COOL_S = 5.0
"""Seconds for which a request that was moved, or could not be, stays where it is."""
MOST_UNDER_WAY = 4
"""Requests that move at the same time: each copies KV, and holds its blocks twice."""


@dataclass(frozen=True, slots=True)
class MovableRequest:
    """A request that runs.

    Attributes:
        number: The front's.
        num_blocks: Of its known tokens and the next one.
        tried_s: When its last move began; None if it never moved.
    """

    number: int
    num_blocks: int
    tried_s: float | None = None


@dataclass(frozen=True, slots=True)
class MovePlan:
    """A request is to move.

    Attributes:
        request: Its number.
        source: Epoch of its instance.
        target: Epoch of the one that is to go on with it.
    """

    request: int
    source: int
    target: int


def choose_move(
    views: Iterable[InstanceView], requests: Mapping[int, Iterable[MovableRequest]], num_under_way: int, now: float
) -> MovePlan | None:
    """The next move; None if none is worth it. Ask again with the move applied (``apply_move``).

    Args:
        views: Instances that take requests; requests under way count where they are going.
        requests: By epoch: those that run there and are not under way.
        num_under_way: How many are.
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
    """Both instances when a request of so many blocks has moved."""
    return _add(source, -num_blocks, -1), _add(target, num_blocks, 1)


def _add(view: InstanceView, num_blocks: int, num_requests: int) -> InstanceView:
    return replace(
        view,
        num_demanded_blocks=view.num_demanded_blocks + num_blocks,
        num_requests=view.num_requests + num_requests,
    )
