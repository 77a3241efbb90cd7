"""The gate before every policy that takes turns: while everybody fits, first come, first served."""

from __future__ import annotations

from random import Random

from floodplain.core.plan import Decision
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View
from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.growth import blocks_due, blocks_for
from floodplain.policy.sharing import SharingPolicy


class GatedPolicy:
    """FCFS while all live requests fit, with their growth over one slice; else ``inner`` (AQUA's Figure 8 does so).

    The gate opens when they stop fitting. It closes when nobody is in swap space any more, and whoever comes back from
    there must fit together with the growth of a slice: between the two lies the hysteresis. Without swap space it stays
    closed: a turn that costs a prompt is worse than waiting.
    """

    def __init__(self, inner: SharingPolicy) -> None:
        self.name = inner.name
        self.waiting_window = inner.waiting_window
        self._inner = inner
        self._fcfs = FcfsPolicy()
        self._slice_steps = inner.settings.slice_steps
        self._takes_turns_by_recompute = inner.settings.takes_turns_by_recompute

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """As the inner policy."""
        return self._inner.waiting_key(seq)

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """FCFS's decision or the inner policy's."""
        is_plain = everybody_fits(view, self._slice_steps) or not (view.tiers or self._takes_turns_by_recompute)
        policy: Policy = self._fcfs if is_plain else self._inner
        return policy.decide(view, now, rng)


def everybody_fits(view: View, slice_steps: int) -> bool:
    """Whether all live requests can be on the device now and after ``slice_steps`` more steps."""
    if view.swapped or view.loading or view.num_waiting > len(view.waiting):
        return False
    if len(view.running) + len(view.waiting) > view.max_num_seqs:
        return False
    num_free = view.num_available_blocks
    for row in view.waiting:
        num_free -= blocks_for(view, row.num_tokens + slice_steps) - row.num_shared_blocks
    if num_free >= len(view.running) * (1 + slice_steps // view.block_tokens) and _only_decodes(view):
        return True  # the quick answer for a pool with room: streams cannot grow faster than that
    return sum(blocks_due(view, row, slice_steps) for row in view.running) <= num_free


def _only_decodes(view: View) -> bool:
    return all(row.is_decoding for row in view.running)
