"""The gate before every time-slicing policy: FCFS decides while all live requests fit on the device."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from random import Random

from floodplain.core.plan import Decision, Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View
from floodplain.policy.base import SharingPolicy, Standing
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.growth import count_spare_blocks, most_growth
from floodplain.policy.prefixes import count_at_risk, prefix_backup
from floodplain.policy.ranking import Ranking, live_rows
from floodplain.policy.swap import copying_pays
from floodplain.policy.turn import share


class GatedPolicy:
    """FCFS while all live requests fit, with their growth over one slice; else ``inner`` (AQUA's Figure 8 does so).

    The gate opens when requests stop fitting, or when prompts take too long for the policy. It closes when no request
    is in swap space and all fit with the growth of a slice. It stays closed without swap space, and, with that as the
    decision's reason, while swap space is too slow by the measured prices. Then a policy that chooses admissions still
    ranks, no resident is preempted for another request, and swapped requests are resumed when there is room. While all
    requests fit, prefixes that are about to be evicted are backed up in swap space.
    """

    def __init__(self, inner: SharingPolicy) -> None:
        self.name = inner.name
        self.waiting_window, self.num_newest = inner.waiting_window, inner.num_newest
        self.keeps_goals, self.chooses_admissions = inner.keeps_goals, inner.chooses_admissions
        self._inner = inner
        self._fcfs = FcfsPolicy()
        self._slice_steps = inner.gate_steps

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """The inner policy's key."""
        return self._inner.waiting_key(seq)

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """FCFS's decision or the inner policy's."""
        num_spare = count_spare_blocks(view, self._slice_steps)
        if num_spare >= 0 and not self._inner.has_long_prompts(view):
            decision = self._fcfs.decide(view, now, rng)
            order = prefix_backup(view, decision, num_spare)
            return decision if order is None else replace(decision, prefix_backup=order)
        if view.tiers and copying_pays(view) and self._has_slots(view):
            return self._inner.decide(view, now, rng)
        return self._without_turns(view, now, rng, _why_no_turns(view) if num_spare < 0 else None)

    def stands(self, view: View) -> Standing | None:
        """While all live requests run and have room to grow: then FCFS decides."""
        least_available = most_growth(view, self._slice_steps)
        if view.waiting or view.swapped or view.loading or view.num_available_blocks < least_available:
            return None
        return Standing(least_available, count_at_risk(view))

    def _has_slots(self, view: View) -> bool:
        return sum(tier.num_slots for tier in view.tiers) >= self._inner.least_slots * view.num_blocks

    def _without_turns(self, view: View, now: float, rng: Random, reason: Reason | None) -> Decision:
        """FCFS, or the admissions of ``inner``; swapped requests are resumed when there is room."""
        if self._inner.chooses_admissions:
            ranking = self._inner.rank(replace(view, tiers=()), now)
        elif view.swapped or view.loading:
            rows = sorted(live_rows(view), key=attrgetter("order_key"))
            ranking = Ranking(rows, frozenset(), self._slice_steps)
        else:
            return replace(self._fcfs.decide(view, now, rng), reason=reason)
        residents = frozenset(row.seq_id for row in view.running)  # none of them is preempted for another request
        ranking = replace(ranking, staying=residents, reason=reason)
        return share(view, ranking, self._inner.settings)


def _why_no_turns(view: View) -> Reason:
    is_slow = view.tiers and not copying_pays(view)
    return Reason.SWAP_SLOW if is_slow else Reason.NO_SWAP
