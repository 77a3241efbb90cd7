"""Serves requests in virtual time: one engine's loop and policy, with computed times of steps and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request
from floodplain.core.tiers import Link, SlotLedger
from floodplain.policy.base import Policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import Counters, LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualDevice:
    """A device that computes and holds KV, and the swap space behind its link (none with 0 slots)."""

    step_time_s: Callable[[StepPlan], float]
    num_blocks: int
    block_tokens: int
    config: LoopConfig
    link: Link
    num_swap_slots: int
    caches_prefixes: bool = True

    def make_loop(self, policy: Policy, seed: int) -> Loop:
        """An empty loop on this device."""
        ledger = BlockLedger(self.num_blocks, self.block_tokens, caches_prefixes=self.caches_prefixes)
        slots = [SlotLedger(self.link.tier, self.num_swap_slots)] if self.num_swap_slots else []
        backups = BackupTable(slots, retains=self.caches_prefixes)
        return Loop(LoopState(self.config, ledger, policy, backups, [self.link]), policy, seed)


@dataclass(slots=True)
class Peaks:
    """The largest use of memory in any step, in blocks.

    Cached prefixes do not count in the pool; in swap space backups of requests on the device do, idle ones do not.
    ``swapped_blocks`` are backups that preempted requests need.
    """

    pool_blocks: int = 0
    swap_slots: int = 0
    swapped_blocks: int = 0

    def note(self, state: LoopState) -> None:
        """Add a planned step: its blocks and slots are allocated, and none is freed yet."""
        in_use = state.ledger.num_blocks - state.ledger.num_available
        slots = sum(slots.num_taken - state.backups.num_idle(tier) for tier, slots in state.backups.slots.items())
        self.pool_blocks = max(self.pool_blocks, in_use)
        self.swap_slots = max(self.swap_slots, slots)
        if sum(len(seq.backups) + (seq.tail is not None) for seq in state.swapped) > self.swapped_blocks:
            swapped = {backup for backups in state.swapped_backups() for backup in backups}  # prefixes they share, once
            self.swapped_blocks = max(self.swapped_blocks, len(swapped))


@dataclass(frozen=True, slots=True)
class Served:
    """The result of serving requests; ``lifecycles`` are in order of arrival.

    ``duration_s`` is the virtual time until the last token and the last copy, ``stall_s`` the time in which nothing
    could run before a copy ended.
    """

    lifecycles: list[Lifecycle]
    duration_s: float
    busy_s: float
    stall_s: float
    counters: Counters
    peaks: Peaks


def serve(
    requests: Iterable[Request],
    policy: Policy,
    device: VirtualDevice,
    *,
    seed: int = 0,
    on_step: Callable[[LoopState, float], None] | None = None,
) -> Served:
    """Submit all requests at their arrival times, and serve them to their ends with a new policy object.

    Outputs end by ``max_tokens``; prompts share prefixes by their token ids. ``on_step`` is called with the loop's
    state and the time when a step begins. RequestRefused or QueueFull as from the loop.
    """
    environment, peaks = Environment(), Peaks()
    links = VirtualLinks({device.link.tier: device.link}, device.config.block_bytes)
    loop = device.make_loop(policy, seed)
    instance = VirtualInstance(environment, loop, device.step_time_s, links)

    def note(_: StepPlan, now: float) -> None:
        peaks.note(loop.state)
        if on_step is not None:
            on_step(loop.state, now)

    instance.on_step = note
    for request in requests:
        environment.schedule(request.arrival_s, partial(instance.submit, request))
    environment.run()
    return Served(
        list(instance.lifecycles.values()),
        duration_s=environment.now,
        busy_s=instance.busy_s,
        stall_s=instance.stall_s,
        counters=loop.counters,
        peaks=peaks,
    )
