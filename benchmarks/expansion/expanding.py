"""The closed form's times of steps with streamed layers, for ``sim.expanding``."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.plan import StepPlan


@dataclass(slots=True, kw_only=True)
class ExpandingCosts:
    """The times of a step. A benchmark or test may change them during the simulation.

    Attributes:
        weights_s: Time in which the device reads all weights.
        block_s: Time in which it reads one block's KV, of all layers.
        token_s: Seconds for each token of a prompt.
        link_ratio: Bandwidth of the link over that of the device's memory.
    """

    weights_s: float
    block_s: float
    link_ratio: float
    token_s: float = 0.0

    @property
    def fixed_s(self) -> float:
        """All weights are read once a step."""
        return self.weights_s

    def step_s(self, plan: StepPlan, num_read: int) -> float:
        """Weights, the KV of every running sequence, and tokens of prompts."""
        return self.weights_s + self.block_s * num_read + self.token_s * plan.count_work()[1]

    def copy_s(self, num_read: int) -> float:
        """As reading from the device, by the ratio of the link."""
        return self.block_s * num_read / self.link_ratio
