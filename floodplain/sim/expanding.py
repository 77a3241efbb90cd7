"""A KV pool with streamed layers in virtual time: the times of steps, and the resizing of the loop's ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from floodplain.core.blocks import BlockLedger
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.plan import StepPlan
from floodplain.core.shrink import commit_shrink, plan_shrink
from floodplain.cost.expansion import step_stall_s
from floodplain.policy.expansion import ExpansionPolicy, ExpansionView
from floodplain.runtime.loop import Loop


@dataclass(slots=True)
class StreamingCosts:
    """The times of steps and copies. Changes during a simulation are in effect from the next step on.

    Attributes:
        step_s: Seconds of one plan that reads so many blocks of KV, without stalls.
        fixed_s: The part of a step that a larger batch does not lengthen.
        block_s: Seconds of the link to load one block, of all layers.
    """

    step_s: Callable[[StepPlan, int], float]
    fixed_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class ExpandingStep:
    """One step: its time without stalls, the stall, layers that streamed, and tokens that it sampled."""

    step_s: float
    stall_s: float
    num_streamed: int
    num_sampled: int


class ExpandingPool:
    """The loop's pool. ``step_time_s`` and ``at_boundary`` are for a ``VirtualInstance``.

    ``loop``: an empty loop, whose pool is that without streamed layers. ``policy``: decides at every boundary; None:
    the first of ``places`` stays.
    """

    def __init__(
        self, loop: Loop, places: tuple[LayerPlaces, ...], costs: StreamingCosts, policy: ExpansionPolicy | None = None
    ) -> None:
        self.costs = costs
        self.steps: list[ExpandingStep] = []
        self._loop, self._policy = loop, policy
        self._places = {one.num_streamed: one for one in places}
        self._base_blocks = self._ledger.num_blocks
        self._here = places[0]
        self._num_preempted = 0
        self._copy_s = 0.0
        self._resize(places[0])

    @property
    def _ledger(self) -> BlockLedger:
        return self._loop.state.ledger

    def step_time_s(self, plan: StepPlan) -> float:
        """Seconds of one plan, stall included. The blocks of every running sequence are read."""
        num_read = sum(len(seq.blocks) for seq in self._loop.state.running)
        step_s = self.costs.step_s(plan, num_read)
        self._copy_s = num_read * self.costs.block_s / self._here.num_layers
        stall_s = step_stall_s(self._here, step_s, self._copy_s)
        self.steps.append(ExpandingStep(step_s, stall_s, self._here.num_streamed, len(plan.sampled)))
        return step_s + stall_s

    def at_boundary(self) -> None:
        """Between two steps: let the policy decide, and grow or shrink."""
        if self._policy is not None:
            self._resize(self._places[self._policy.decide(self._look()).num_streamed])

    def _look(self) -> ExpansionView:
        step, ledger = self.steps[-1], self._ledger
        num_preempted = sum(self._loop.counters.preemptions.values())
        is_binding = num_preempted > self._num_preempted or bool(self._loop.state.waiting.head())
        self._num_preempted = num_preempted
        return ExpansionView(
            step_s=step.step_s,
            stall_s=step.stall_s,
            copy_s=self._copy_s,
            num_streamed=self._here.num_streamed,
            num_held_blocks=ledger.num_blocks - ledger.num_available,
            num_blocks=ledger.num_blocks,
            is_binding=is_binding,
            fixed_s=self.costs.fixed_s,
        )

    def _resize(self, places: LayerPlaces) -> None:
        """Grow at once; shrink as far as used blocks allow. ``places`` are in effect once the pool is small enough."""
        ledger = self._ledger
        target = int(self._base_blocks * places.expansion) // ledger.quantum_blocks * ledger.quantum_blocks
        if target < ledger.num_blocks:
            self._loop.remap_blocks(commit_shrink(ledger, plan_shrink(ledger, target)))
        elif target > ledger.num_blocks:
            ledger.add_memory(self._find_absent(target - ledger.num_blocks))
        if ledger.num_blocks <= target:
            self._here = places

    def _find_absent(self, num_blocks: int) -> list[int]:
        """The first ``num_blocks`` blocks without memory."""
        ledger = self._ledger
        num_indexed = ledger.num_indexed_blocks
        absent = [block for block in range(num_indexed) if not ledger.survey(block, 1)[0]]
        return [*absent, *range(num_indexed, num_indexed + num_blocks)][:num_blocks]
