"""Chooses migrations of running requests: Llumnix's rescheduling (OSDI'24, sections 4.2 and 4.4). Pure.

A request migrates from the instance with the least freeness (``policy.dispatch``) to the freest one, if the former is
below ``LOW_FREENESS`` and the latter is still at ``HIGH_FREENESS`` or above afterwards. So a target becomes a source
only after its load has grown, and requests do not move to and fro under a constant load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from floodplain.policy.dispatch import InstanceView, freeness

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
    """A running request that may migrate.

    Attributes:
        number: The router's number of the request.
        num_blocks: Of its known tokens and the next one.
        tried_s: When its last move began; None if it never moved.
    """

    number: int
    num_blocks: int
    tried_s: float | None = None


@dataclass(frozen=True, slots=True)
class MovePlan:
    """One migration to begin.

    Attributes:
        request: Number of the request.
        source: Epoch of its instance.
        target: Epoch of the instance that is to resume it.
    """

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
        num_under_way: Migrations under way.
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
