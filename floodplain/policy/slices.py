"""The length of slices, such that the copies of the next slice overlap with the current one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from floodplain.core.plan import Reason
from floodplain.core.view import View
from floodplain.policy.settings import SharingSettings

LINK_USE = 0.85
"""Most part of the link's time that turns may use; the rest is for backups of prompts and for jitter."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Steps of a slice, and the reason if they are more than the settings say."""

    steps: int
    reason: Reason | None = None


def slice_for(view: View, num_blocks: int, settings: SharingSettings, num_steps_beside: int = 0) -> Slice:
    """The configured slice, lengthened if needed to swap ``num_blocks`` in over the nearest link.

    Args:
        view: Has the prices of links and steps.
        num_blocks: All blocks that are swapped in turns.
        settings: Has the configured slice.
        num_steps_beside: Steps beside each slice for which blocks are held for copies; the link can use them, too.
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
    """Blocks that the nearest link swaps in within the configured slice; inf without a link or prices."""
    if not view.tiers or not view.prices.step_s:
        return math.inf
    slice_s = (settings.slice_steps + num_steps_beside) * view.prices.step_s
    return slice_s * LINK_USE / view.tiers[0].block_s
