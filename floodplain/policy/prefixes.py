"""Prefixes in swap space: when waiting requests fetch them, and which are backed up (AQUA, section 8)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from floodplain.core.plan import Decision, PrefixBackupOrder
from floodplain.core.view import Prices, SequenceView, TierView, View
from floodplain.policy.growth import blocks_for


def pays_to_fetch(view: View, row: SequenceView) -> bool:
    """Whether a waiting request's prefix is fetched from swap space faster than it is computed.

    True while the price of computing is unknown. Copies in flight go first; one for another request may be what this
    one needs. The step beside which the copy runs does not count: it delays this request, but skipping delays no other.
    """
    num_tokens = row.num_restorable_tokens - row.num_cached_tokens
    if num_tokens <= 0 or not view.tiers:
        return False
    tier = view.tiers[0]
    counts = tier.num_inbound_blocks, row.num_backed_blocks
    fetch_s = tier.latency_s + (max(counts) if row.is_arriving else sum(counts)) * tier.block_s
    compute_s = num_tokens * view.prices.prefill_token_s
    return not compute_s or fetch_s < compute_s


def prefix_backup(view: View, step: Decision, num_spare_blocks: int) -> PrefixBackupOrder | None:
    """Back up the cached prefixes that one step could evict, a few blocks at a time; None if none need it now.

    The copies run beside ``step``, and only while the link is idle: no more than cross it in the step. At most half of
    the spare blocks are copied at a time, since a block that a copy reads cannot be allocated.
    """
    if not view.tiers or view.num_empty_blocks == view.num_available_blocks:
        return None
    tier = next((tier for tier in view.tiers if tier.num_free_slots), view.tiers[0])
    num_at_risk = count_at_risk(view)
    if tier.num_outbound_blocks or view.num_empty_blocks >= num_at_risk:
        return None
    num_at_risk = min(num_at_risk, tier.num_free_slots)  # more would evict backups that were just made
    num_blocks = min(num_at_risk, num_spare_blocks // 2, _blocks_within_step(view, step, tier))
    return PrefixBackupOrder(num_at_risk, num_blocks, tier.tier) if num_blocks > 0 else None


def least_chance_to_save(tiers: Iterable[TierView], prices: Prices, block_tokens: int) -> float:
    """The least chance of a use at which a block that no request uses is worth a copy to the nearest tier.

    The copy costs as much as fetching it, which saves computing it, without the link's latency. 0 while the price of
    computing is unknown, inf if copying is no faster.
    """
    tier = next(iter(tiers), None)
    compute_s = block_tokens * prices.prefill_token_s
    if tier is None or not compute_s:
        return inf if tier is None else 0.0
    return tier.block_s / (compute_s - tier.block_s) if tier.block_s < compute_s else inf


def count_at_risk(view: View) -> int:
    """The most cached blocks that one step could evict; 0 without swap space."""
    return blocks_for(view, view.max_batched_tokens) if view.tiers else 0


def _blocks_within_step(view: View, step: Decision, tier: TierView) -> int:
    """Blocks whose copies begin and end while a step runs; 0 while the step's time is unknown."""
    num_prompt = sum(chunk.num_tokens for chunk in (*step.chunks, *step.admissions))
    step_s = num_prompt * view.prices.prefill_token_s + (view.prices.step_s if step.decodes else 0.0)
    if not step_s:
        return 0
    return int((step_s - tier.latency_s) / tier.block_s) if tier.block_s else view.num_blocks
