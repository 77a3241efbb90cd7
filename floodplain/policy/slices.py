"""How long a slice must be so that the copies of the next one hide behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from floodplain.core.plan import Reason
from floodplain.core.view import View
from floodplain.policy.settings import SharingSettings

LINK_USE = 0.85
"""Of the link's time, at most, that taking turns may plan with: the rest is for prompts' backups and for jitter."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Steps of a slice, and why they are more than was asked."""

    steps: int
    reason: Reason | None = None


def slice_for(view: View, num_blocks: int, settings: SharingSettings, num_steps_beside: int = 0) -> Slice:
    """The slice that was asked for, or as many steps as it takes to bring ``num_blocks`` in over the nearest link.

    Args:
        view: Has the prices of links and steps.
        num_blocks: All that takes turns.
        settings: Has the slice that was asked for.
        num_steps_beside: Steps for which a block that takes turns is held beside each slice: the link has these, too.
    """
    prices = view.prices
    if not view.tiers or not prices.step_s:
        return Slice(settings.slice_steps)
    needed_s = num_blocks * view.tiers[0].block_s / LINK_USE
    num_steps = math.ceil(needed_s / prices.step_s) - num_steps_beside
    if num_steps <= settings.slice_steps:
        return Slice(settings.slice_steps)
    return Slice(num_steps, Reason.LINK_BUSY)


def blocks_in_slice(view: View, settings: SharingSettings, num_steps_beside: int = 0) -> float:
    """The blocks that the nearest link brings in within the slice that was asked for; inf without a link or prices."""
    if not view.tiers or not view.prices.step_s:
        return math.inf
    slice_s = (settings.slice_steps + num_steps_beside) * view.prices.step_s
    return slice_s * LINK_USE / view.tiers[0].block_s
