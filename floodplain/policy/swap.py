"""Where a victim's KV goes, and what is written behind before anybody leaves."""

from __future__ import annotations

from collections.abc import Iterable

from floodplain.core.plan import BackupOrder, Preemption, PreemptionMode, Reason
from floodplain.core.tiers import Tier
from floodplain.core.view import SequenceView, TierView, View

SLOTS_FOR_TURNS = 0.25
"""This part of a tier's slots is left by writing behind to those that really leave."""


class SwapBudget:
    """Scratch state of one decision: free slots and links of each tier, nearest first.

    Attributes:
        reason: Why somebody had to leave without its KV or to wait, if somebody had.
        is_short: Whether somebody stays, though its slice is over, for want of slots.
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
        """Whether it will have to compute again when its turn ends."""
        return not any(self._copying_pays(row, tier) for tier in self._view.tiers)

    def can_keep(self, row: SequenceView, num_slots: int) -> bool:
        """Whether somebody's turn may end now, if ``num_slots`` are needed so far: it costs a copy, not a prompt.

        It may also cost a prompt where that is the cheaper way, or where there is no swap space at all.
        """
        tiers = [tier.tier for tier in self._view.tiers if self._copying_pays(row, tier)]
        if not tiers or any(self._free[tier] >= num_slots for tier in tiers):
            return True
        self.is_short, self.reason = True, Reason.SWAP_FULL
        return False

    def can_hold_prefix(self, row: SequenceView) -> bool:
        """Whether the slots where a request's prefix lies are not promised to somebody who leaves.

        They count as free while nobody holds them. That others may hold some of them already is not seen here.
        """
        return sum(self._free.values()) >= row.num_backed_blocks

    def hold_prefix(self, row: SequenceView) -> None:
        """A request fetches its prefix: the slots where that lies do not give way to others any more."""
        missing = row.num_backed_blocks
        for tier, num_free in self._free.items():  # where it lies is not seen here: the nearest first
            self._free[tier] -= min(num_free, missing)
            missing -= min(num_free, missing)

    def preempt(self, row: SequenceView, reason: Reason) -> tuple[Preemption, int]:
        """How a victim leaves, and how many blocks are free only when they are copied."""
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
        """Whether its KV comes back sooner than it is computed; yes while prices are unknown."""
        compute_s = num_computed(self._view, row) * self._view.prices.prefill_token_s
        return not compute_s or row.num_blocks * tier.block_s + tier.latency_s < compute_s

    # -- behind ----------------------------------------------------------------------------------------------------

    def write_behind(self, victims: Iterable[SequenceView]) -> tuple[BackupOrder, ...]:
        """Back up full blocks, likeliest victims first, as far as the link can carry within a step.

        Not of those that would compute again all the same: a copy holds blocks up until it ends.
        """
        tier = next((tier for tier in self._view.tiers if self._num_spare(tier) >= 1), None)
        if tier is None:
            return ()
        budget, orders = min(self._num_spare(tier), self._link_budget(tier)), []
        for row in victims:
            if budget < 1:
                break
            num_full = num_computed(self._view, row) // self._view.block_tokens
            num_blocks = min(num_full - row.num_backed_blocks, budget)
            if num_blocks > 0 and self._copying_pays(row, tier):
                orders.append(BackupOrder(row.seq_id, num_blocks, tier.tier))
                budget -= num_blocks
        return tuple(orders)

    def _num_spare(self, tier: TierView) -> int:
        """Free slots of a tier that need not be left to those that really leave."""
        return self._free[tier.tier] - int(SLOTS_FOR_TURNS * tier.num_slots)

    def _link_budget(self, tier: TierView) -> int:
        """Blocks that go over the link while a step runs, less those that are still on it or about to leave."""
        return blocks_per_step(self._view, tier) - self._outbound[tier.tier]


def copying_pays(view: View) -> bool:
    """Whether some tier gives a block back sooner than it is computed; yes while prices are unknown.

    A hysteresis pair: turns begin only where a copy takes at most half as long as computing, and go on, while somebody
    is in swap space, until it takes as long. They do not begin where only slower tiers have room.
    """
    if view.swapped:
        return bool(quick_tiers(view))
    quick = quick_tiers(view, margin=2.0)
    has_room_elsewhere = any(tier.num_free_slots for tier in view.tiers if tier not in quick)
    return any(tier.num_free_slots for tier in quick) or bool(quick and not has_room_elsewhere)


def quick_tiers(view: View, margin: float = 1.0) -> list[TierView]:
    """Those that give a block back ``margin`` times sooner than it is computed; all while prices are unknown."""
    compute_s = view.block_tokens * view.prices.prefill_token_s
    return [tier for tier in view.tiers if not compute_s or tier.block_s * margin < compute_s]


def blocks_per_step(view: View, tier: TierView) -> int:
    """Blocks that the link carries one way while a step runs; at least one."""
    step_s = view.prices.step_s
    return max(1, int(step_s / tier.block_s)) if step_s and tier.block_s else view.num_blocks


def num_computed(view: View, row: SequenceView) -> int:
    """Tokens of a running sequence that have KV on the device."""
    return row.num_scheduled + (view.step - row.since_step if row.is_decoding else 0)
