"""Chooses where a victim's KV goes, and which full blocks are backed up ahead of preemptions."""

from __future__ import annotations

from collections.abc import Iterable

from floodplain.core.plan import BackupOrder, Preemption, PreemptionMode, Reason
from floodplain.core.tiers import Tier
from floodplain.core.view import SequenceView, TierView, View
from floodplain.policy.growth import full_blocks

SLOTS_FOR_TURNS = 0.25
"""Part of a tier's slots that backups leave to swap-outs."""


class SwapBudget:
    """Scratch state of one decision: free slots and links of each tier, nearest first.

    ``reason``: why a victim lost its KV, or a request must wait. ``is_short``: a resident stays after its slice because
    swap space lacks slots.
    """

    def __init__(self, view: View) -> None:
        self.reason: Reason | None = None
        self.is_short = False
        self._view = view
        self._free = {tier.tier: tier.num_free_slots for tier in view.tiers}
        self._outbound = {tier.tier: tier.num_outbound_blocks for tier in view.tiers}

    def num_copied(self, row: SequenceView) -> int:
        """Blocks that a copy must read before they are free: those that are not backed up."""
        return max(0, row.num_blocks - row.num_backed_blocks)

    def loses_kv(self, row: SequenceView) -> bool:
        """Whether a preemption would drop its KV: nothing can restore it, or recomputing is cheaper than any copy."""
        return not any(self._copying_pays(row, tier) for tier in self._view.tiers)

    def can_keep(self, row: SequenceView, num_slots: int) -> bool:
        """Whether a resident's turn may end now: no copy pays, or a tier has ``num_slots``, of all chosen so far."""
        tiers = [tier.tier for tier in self._view.tiers if self._copying_pays(row, tier)]
        if not tiers or any(self._free[tier] >= num_slots for tier in tiers):
            return True
        self.is_short, self.reason = True, Reason.SWAP_FULL
        return False

    def can_hold_prefix(self, row: SequenceView) -> bool:
        """Whether no preemption of this decision needs slots of a request's prefix; idle backups count as free."""
        return sum(self._free.values()) >= row.num_backed_blocks

    def hold_prefix(self, row: SequenceView) -> None:
        """Count the slots of a prefix that a request fetches as taken."""
        missing = row.num_backed_blocks
        for tier, num_free in self._free.items():  # the view does not say in which tier: the nearest first
            self._free[tier] -= min(num_free, missing)
            missing -= min(num_free, missing)

    def preempt(self, row: SequenceView, reason: Reason) -> tuple[Preemption, int]:
        """Returns (the preemption of a victim, its blocks that are free only after they are copied)."""
        num_copied = self.num_copied(row)
        tier = self._choose_tier(row, num_copied)
        if tier is None:
            return Preemption(row.seq_id, PreemptionMode.RECOMPUTE, reason), 0
        self._free[tier] -= num_copied
        self._outbound[tier] += num_copied
        return Preemption(row.seq_id, PreemptionMode.SWAP, reason, tier), num_copied

    def _choose_tier(self, row: SequenceView, num_copied: int) -> Tier | None:
        for tier in self._view.tiers:
            if not self._copying_pays(row, tier):
                self.reason = Reason.SWAP_SLOW
            elif self._free[tier.tier] < num_copied:
                self.reason = Reason.SWAP_FULL
            else:
                return tier.tier
        return None

    def _copying_pays(self, row: SequenceView, tier: TierView) -> bool:
        """Whether swapping its KV in from ``tier`` is faster than recomputing it; True while prices are unknown."""
        if row.loses_kv:
            return False
        compute_s = num_computed(self._view, row) * self._view.prices.prefill_token_s
        return not compute_s or row.num_blocks * tier.block_s + tier.latency_s < compute_s

    # -- behind ----------------------------------------------------------------------------------------------------

    def write_behind(self, victims: Iterable[SequenceView]) -> tuple[BackupOrder, ...]:
        """Back up full blocks, likeliest victims first, at most as many as the link carries within a step.

        Sequences that would be recomputed anyway are skipped: a copy holds blocks until it ends.
        """
        tier = next((tier for tier in self._view.tiers if self._num_spare(tier) >= 1), None)
        if tier is None:
            return ()
        budget, orders = min(self._num_spare(tier), self._link_budget(tier)), []
        for row in victims:
            if budget < 1:
                break
            num_full = full_blocks(self._view, num_computed(self._view, row))
            num_blocks = min(num_full - row.num_backed_blocks, budget)
            if num_blocks > 0 and self._copying_pays(row, tier):
                orders.append(BackupOrder(row.seq_id, num_blocks, tier.tier))
                budget -= num_blocks
        return tuple(orders)

    def _num_spare(self, tier: TierView) -> int:
        return self._free[tier.tier] - int(SLOTS_FOR_TURNS * tier.num_slots)

    def _link_budget(self, tier: TierView) -> int:
        return blocks_per_step(self._view, tier) - self._outbound[tier.tier]


def copying_pays(view: View) -> bool:
    """Whether swapping KV in from some tier is faster than computing it; True while prices are unknown.

    With hysteresis: turns begin only if a copy takes at most half the time of computing, and go on, while sequences are
    swapped, until it takes as long. They do not begin if only slower tiers have free slots.
    """
    if view.swapped:
        return bool(quick_tiers(view))
    quick = quick_tiers(view, margin=2.0)
    has_room_elsewhere = any(tier.num_free_slots for tier in view.tiers if tier not in quick)
    return any(tier.num_free_slots for tier in quick) or bool(quick and not has_room_elsewhere)


def quick_tiers(view: View, margin: float = 1.0) -> list[TierView]:
    """Tiers that return a mean resident's KV ``margin`` times faster than it is computed; all without prices."""
    compute_s = view.block_tokens * view.prices.prefill_token_s / max(1, len(view.groups))
    num_each = max(1.0, (view.num_blocks - view.num_available_blocks) / max(1, len(view.running)))
    return [
        tier for tier in view.tiers
        if not compute_s or (tier.block_s + tier.latency_s / num_each) * margin < compute_s
    ]  # fmt: skip


def blocks_per_step(view: View, tier: TierView) -> int:
    """Blocks that the link carries one way while a step runs; at least one."""
    step_s = view.prices.step_s
    return max(1, int(step_s / tier.block_s)) if step_s and tier.block_s else view.num_blocks


def num_computed(view: View, row: SequenceView) -> int:
    """Tokens of a running sequence that have KV on the device."""
    return row.num_scheduled + (view.step - row.since_step if row.is_decoding else 0)
