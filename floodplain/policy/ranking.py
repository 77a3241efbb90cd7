"""Rankings: the order in which live requests should be on the device, and the length of slices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from floodplain.core.plan import Reason
from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView, View
from floodplain.policy.settings import SharingSettings


@dataclass(frozen=True, slots=True)
class Ranking:
    """All live requests in the order in which they should be on the device.

    Attributes:
        staying: Residents that may not be preempted for other requests yet, because their slice is not over.
        slice_steps: Least steps for which a request that enters now stays.
        reason: What limits the ranking, if the policy could not rank as it would like; else None.
        refills: Whether room is made at once for all requests that should enter; else for one after the other, as
            their victims' blocks are copied and become free, so that copies spread out.
        caps_prompts: Whether prompts get at most ``prefill_share`` of a step; else all that streams leave, as in FCFS.
        prefill_share: Part of a step's time for prompts; None: that of the settings.
    """

    rows: Seq[SequenceView]
    staying: frozenset[SeqId]
    slice_steps: int
    reason: Reason | None = None
    refills: bool = False
    caps_prompts: bool = True
    prefill_share: float | None = None


def live_rows(view: View) -> list[SequenceView]:
    """All live requests that the view shows: running, loading, swapped, waiting."""
    return [*view.running, *view.loading, *view.swapped, *view.waiting]


def rows_in_slice(view: View, slice_steps: int) -> list[SeqId]:
    """Ids of running sequences whose slice is not over."""
    begun = view.step - slice_steps
    return [row.seq_id for row in view.running if row.entered_step > begun]


LINK_USE = 0.85
"""Most part of the link's time that turns may use; the rest is for backups of prompts and for jitter."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Steps of a slice, and the reason if they are more than the settings say."""

    steps: int
    reason: Reason | None = None


def slice_for(view: View, num_blocks: int, settings: SharingSettings, num_steps_beside: int = 0) -> Slice:
    """The configured slice, lengthened if needed to swap all ``num_blocks`` that take turns in over the nearest link.

    For ``num_steps_beside`` steps beside each slice, blocks are held for copies; the link can use them, too.
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


def tokens_of_requests(view: View, slice_steps: int) -> dict[SeqId, int]:
    """Output tokens, by sequence, of the request that it is a choice of; ended choices included.

    The second of a request's choices, the least served first, ranks as if the first had had its slice, and so on: so
    choices take turns, and a request of many choices is never served more than a slice at the cost of another.
    """
    rows = live_rows(view)
    tokens = {row.seq_id: row.num_ended_tokens + max(0, row.num_generated(view.step)) for row in rows}
    further: dict[SeqId, list[SequenceView]] = defaultdict(list)
    for row in rows:
        if row.parent != row.seq_id:
            further[row.parent].append(row)
    for parent, choices in further.items():
        ids = [row.seq_id for row in choices] + ([parent] if parent in tokens else [])
        total = sum([tokens[seq_id] for seq_id in ids]) - (len(ids) - 1) * choices[0].num_ended_tokens
        for place, seq_id in enumerate(sorted(ids, key=lambda each: (tokens[each], each))):
            tokens[seq_id] = total + place * slice_steps
    return tokens
