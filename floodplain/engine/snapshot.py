"""Collects an engine's statistics."""

from __future__ import annotations

from floodplain.core.block_state import BlockState
from floodplain.core.tiers import Tier
from floodplain.engine.outputs import EngineStats, ExpansionFacts
from floodplain.lending.neighbours import LeaseFacts
from floodplain.memory.swap_space import SwapStats
from floodplain.runtime.state import LoopState


def take_snapshot(
    state: LoopState,
    swap: SwapStats,
    *,
    block_bytes: int,
    scheduler_s: float,
    swap_stall_s: float,
    leases: LeaseFacts,
    expansion: ExpansionFacts,
) -> EngineStats:
    """Current gauges and counters; on another thread, a step may run between its reads.

    Args:
        state: Of the loop.
        swap: Counters of copies.
        block_bytes: Bytes of one KV block over all layers.
        scheduler_s: The loop's own time, all steps.
        swap_stall_s: Time in which nothing could run before a copy ended.
        leases: Facts of lending and borrowing.
        expansion: Facts of the layers that stream.
    """
    counters = state.counters
    blocks = {block_state.value: count for block_state, count in state.ledger.count_states().items()}
    backups = state.backups
    kept = {tier.value: max(0, one.num_slots - backups.num_available(tier)) for tier, one in backups.slots.items()}
    return EngineStats(
        num_running=len(state.running) + len(state.loading),
        num_waiting=len(state.waiting),
        num_swapped=len(state.swapped),
        kv_blocks={name: count for name, count in blocks.items() if name != BlockState.ABSENT.value},
        kv_bytes={
            Tier.LOCAL.value: state.ledger.num_blocks * (expansion.block_bytes or block_bytes),
            **{name: num_kept * block_bytes for name, num_kept in kept.items()},
        },
        cached_bytes={tier.value: backups.num_idle(tier) * block_bytes for tier in backups.slots},
        num_blocks=state.ledger.num_blocks,
        num_used_blocks=max(0, state.ledger.num_blocks - state.ledger.num_available),
        num_steps=counters.num_steps,
        scheduler_s=scheduler_s,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        preemptions=dict(counters.preemptions),
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_wasted_tokens=counters.num_wasted_tokens,
        num_requests=dict(counters.finished),
        limited_steps=dict(counters.limited_steps),
        swap_bytes=swap.traffic_bytes,
        backup_bytes=swap.backup_bytes,
        swap_stall_s=swap_stall_s,
        failed_transfers={problem.value: count for problem, count in swap.failed_copies.items()},
        lease_bytes=dict(leases.num_bytes),
        num_recalls=leases.num_recalls,
        recall_times_s=leases.recall_times_s,
        num_failed_growths=leases.num_failed_growths,
        borrowed_leases=dict(leases.num_borrowed),
        failed_exchanges=dict(leases.failed_exchanges),
        expansion=expansion,
    )
