"""The gate before every time-slicing policy: FCFS decides while all live requests fit on the device."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from random import Random

from floodplain.core.plan import Decision, Reason
from floodplain.core.request import OrderKey
from floodplain.core.sequence import Sequence
from floodplain.core.view import View
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.growth import count_spare_blocks
from floodplain.policy.prefixes import prefix_backup
from floodplain.policy.ranking import Ranking, live_rows
from floodplain.policy.sharing import SharingPolicy
from floodplain.policy.swap import copying_pays
from floodplain.policy.turn import share


class GatedPolicy:
    """FCFS while all live requests fit, with their growth over one slice; else ``inner`` (AQUA's Figure 8 does so).

    The gate opens when requests stop fitting. It closes when no request is in swap space and all fit with the growth
    of a slice, which is the hysteresis. Without swap space it stays closed: a turn that costs a prompt is worse than
    waiting. It also stays closed while swap space is too slow, with that as the decision's reason (AQUA, end of §7:
    FCFS when tensors are on DRAM; here the measured prices decide). While all requests fit, prefixes that are about to
    be evicted are backed up in swap space.
    """

    def __init__(self, inner: SharingPolicy) -> None:
        self.name = inner.name
        self.waiting_window, self.num_newest = inner.waiting_window, inner.num_newest
        self.keeps_goals = inner.keeps_goals
        self._inner = inner
        self._fcfs = FcfsPolicy()
        self._slice_steps = inner.gate_steps

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """The inner policy's key."""
        return self._inner.waiting_key(seq)

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """FCFS's decision or the inner policy's."""
        num_spare = count_spare_blocks(view, self._slice_steps)
        if num_spare >= 0:
            decision = self._fcfs.decide(view, now, rng)
            order = prefix_backup(view, decision, num_spare)
            return decision if order is None else replace(decision, prefix_backup=order)
        if not view.tiers:
            return replace(self._fcfs.decide(view, now, rng), reason=Reason.NO_SWAP)
        if copying_pays(view):
            return self._inner.decide(view, now, rng)
        return self._wait_in_line(view, now, rng)

    def _wait_in_line(self, view: View, now: float, rng: Random) -> Decision:
        """FCFS; swapped requests are resumed by arrival when there is room, without preempting residents."""
        if not (view.swapped or view.loading):
            return replace(self._fcfs.decide(view, now, rng), reason=Reason.SWAP_SLOW)
        rows = sorted(live_rows(view), key=attrgetter("order_key"))
        residents = frozenset(row.seq_id for row in view.running)
        return share(view, Ranking(rows, residents, self._slice_steps, Reason.SWAP_SLOW), self._inner.settings)
