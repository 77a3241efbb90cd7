"""Chooses the freest instance for a request, as Llumnix does; a known prefix decides near ties.

Freeness (Llumnix, OSDI'24, section 4.4) is an instance's blocks less the demand of all its requests, waiting ones
included, divided by the number of its requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEARLY = 0.75
"""Part of the best freeness from which on an instance counts as almost as free, so that a known prefix decides."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """Load of an instance when a request is to be placed.

    Attributes:
        epoch: Names the instance; higher ones joined later.
        num_blocks: Blocks of its KV pool.
        num_demanded_blocks: Blocks for the known tokens of its running and waiting requests.
        num_requests: Running and waiting requests.
        num_known_blocks: Leading blocks of the request that it has probably computed for an earlier one.
    """

    epoch: int
    num_blocks: int
    num_demanded_blocks: int
    num_requests: int
    num_known_blocks: int = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request demands; negative if demand exceeds the pool."""
        return self.num_blocks - self.num_demanded_blocks


def freeness(view: InstanceView) -> float:
    """Free blocks per request; if blocks are missing, minus their number, undivided."""
    num_free = view.num_free_blocks
    return num_free / max(1, view.num_requests) if num_free > 0 else float(num_free)


def choose_instance(views: Iterable[InstanceView], num_needed_blocks: int) -> int | None:
    """The epoch of the instance that gets a request; None if there is none.

    A known prefix counts only if the request fits beside the instance's demand. Ties go to fewer requests, then to the
    instance that joined first.

    Args:
        views: Instances that take requests.
        num_needed_blocks: Blocks of the request's known tokens.
    """
    candidates = list(views)
    if not candidates:
        return None
    least = NEARLY * max(map(freeness, candidates))

    def key(view: InstanceView) -> tuple[int, float, int, int]:
        is_near = freeness(view) >= least and view.num_free_blocks >= num_needed_blocks
        return view.num_known_blocks if is_near else 0, freeness(view), -view.num_requests, -view.epoch

    return max(candidates, key=key).epoch
