"""Prefixes in swap space: when a waiting request fetches its own, and what is kept there (AQUA, section 8)."""

from __future__ import annotations

from floodplain.core.plan import Decision, PrefixBackupOrder
from floodplain.core.view import SequenceView, TierView, View
from floodplain.policy.growth import blocks_for


def pays_to_fetch(view: View, row: SequenceView) -> bool:
    """Whether the prefix of a waiting request comes sooner from swap space than it is computed.

    Yes while nobody knows what computing costs. Copies that are under way already go before it; its own may be one of
    them, made for somebody else. The step beside which the copy runs does not count: it delays this request, but what
    is not computed delays nobody else.
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
    """Keep in swap space what the device is about to forget, as far as one step can make it forget, bit by bit.

    Beside ``step``, and only while the link has nothing else to send. A block that is copied cannot be given away: at
    most half of the blocks that nobody will need are copied at a time, and no more than cross the link within the step.
    """
    if not view.tiers or view.num_empty_blocks == view.num_available_blocks:
        return None
    tier = next((tier for tier in view.tiers if tier.num_free_slots), view.tiers[0])
    num_at_risk = blocks_for(view, view.max_batched_tokens)
    if tier.num_outbound_blocks or view.num_empty_blocks >= num_at_risk:
        return None
    num_at_risk = min(num_at_risk, tier.num_free_slots)  # more would push out what was saved just before
    num_blocks = min(num_at_risk, num_spare_blocks // 2, _blocks_within_step(view, step, tier))
    return PrefixBackupOrder(num_at_risk, num_blocks, tier.tier) if num_blocks > 0 else None


def _blocks_within_step(view: View, step: Decision, tier: TierView) -> int:
    """Blocks whose copy begins and ends while a step runs; none while nobody knows what it takes."""
    num_prompt = sum(chunk.num_tokens for chunk in (*step.chunks, *step.admissions))
    step_s = num_prompt * view.prices.prefill_token_s + (view.prices.step_s if step.decodes else 0.0)
    if not step_s:
        return 0
    return int((step_s - tier.latency_s) / tier.block_s) if tier.block_s else view.num_blocks
