"""The work of a loop's steps in each layer, with which a schedule of layers times plans for ``VirtualExecutor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from floodplain.core.plan import StepPlan
from floodplain.core.request import SeqId
from floodplain.sim.layer_schedule import LayerSchedule, LayerWork, StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of a model's KV, layer by layer.

    Attributes:
        num_layers: Layers of the model.
        block_tokens: Tokens of a block.
        token_bytes: KV of one token in one layer.
    """

    num_layers: int
    block_tokens: int
    token_bytes: int

    def block_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer's blocks for ``num_tokens`` tokens of a sequence."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens * self.token_bytes


class PlanWork:
    """Computes the work of a loop's plans in each layer; every plan must be passed, in order.

    A shared block is counted for each of its sequences.

    Args:
        shape: The model's shape.
        compute_s: Returns the seconds of a plan, given the bytes of KV that it reads in one layer. They are spread
            evenly over the layers.
    """

    def __init__(self, shape: LayerShape, compute_s: Callable[[StepPlan, int], float]) -> None:
        self._shape = shape
        self._compute_s = compute_s
        self._num_computed: dict[SeqId, int] = {}  # tokens of each resident sequence

    def work_of(self, plan: StepPlan) -> LayerWork:
        """The work of the next plan. Call it once for each plan, in order."""
        for seq_id in (*plan.released, *(preemption.seq_id for preemption in plan.preemptions)):
            self._num_computed.pop(seq_id, None)
        read_bytes = sum(map(self._shape.block_bytes, self._note_batch(plan)))
        return LayerWork(
            compute_s=(self._compute_s(plan, read_bytes) / self._shape.num_layers,) * self._shape.num_layers,
            read_bytes=read_bytes,
            written_bytes=plan.num_tokens * self._shape.token_bytes,
            held_bytes=sum(map(self._shape.block_bytes, self._num_computed.values())),
        )

    def _note_batch(self, plan: StepPlan) -> list[int]:
        """Tokens that each sequence of the batch has in the KV cache before the step."""
        before = [self._num_computed[seq_id] for seq_id in plan.decodes]
        for seq_id in plan.decodes:
            self._num_computed[seq_id] += 1
        for chunk in plan.prefills:
            before.append(chunk.start)
            self._num_computed[chunk.seq_id] = chunk.start + len(chunk.token_ids)
        return before


class LayeredSteps:
    """Times plans by a schedule of layers, as if steps ran back to back.

    Args:
        schedule: The schedule of layers.
        work_of: Returns the work of a plan in a layer.

    Attributes:
        costs: Costs of all steps that computed.
    """

    def __init__(self, schedule: LayerSchedule, work_of: Callable[[StepPlan], LayerWork]) -> None:
        self.costs: list[StepCost] = []
        self._schedule = schedule
        self._work_of = work_of

    def time_s(self, plan: StepPlan) -> float:
        """Seconds of one plan; 0 for one that only moves KV."""
        work = self._work_of(plan)
        if not plan.num_tokens:
            return 0.0
        self.costs.append(self._schedule.step(work))
        return self.costs[-1].duration_s
