"""Which instance gets a request: the freest one, as in Llumnix; a known prefix decides between almost equal ones.

Freeness (Llumnix, OSDI'24, section 4.4) is what is left of an instance's blocks after the demand of all its requests,
those that wait included, for each request there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEARLY = 0.75
"""An instance with this part of the best freeness is almost as free: a prefix that it has may count for more."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What is seen of an instance when a request is to be placed.

    Attributes:
        epoch: Names the instance; higher ones joined later.
        num_blocks: Blocks of its KV pool.
        num_demanded_blocks: Blocks that its requests need for the tokens that they have, running and waiting ones.
        num_requests: How many these are.
        num_known_blocks: Leading blocks of the request that it has probably computed for an earlier one.
    """

    epoch: int
    num_blocks: int
    num_demanded_blocks: int
    num_requests: int
    num_known_blocks: int = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody demands; below 0 if requests wait for blocks."""
        return self.num_blocks - self.num_demanded_blocks


def freeness(view: InstanceView) -> float:
    """Free blocks for each request; blocks that are missing count whole, so that a crowd does not hide them."""
    num_free = view.num_free_blocks
    return num_free / max(1, view.num_requests) if num_free > 0 else float(num_free)


def choose_instance(views: Iterable[InstanceView], num_needed_blocks: int) -> int | None:
    """The epoch of the instance that gets a request; None if there is none.

    A prefix counts only where the request fits beside the demand that is there. Ties go to fewer requests, then to the
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
