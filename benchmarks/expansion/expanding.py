"""The closed form's times of steps with streamed layers, for ``sim.expanding``."""

from __future__ import annotations

from floodplain.core.plan import StepPlan
from floodplain.sim.expanding import StreamingCosts


def closed_form(*, weights_s: float, block_s: float, link_ratio: float, token_s: float = 0.0) -> StreamingCosts:
    """A step reads all weights once, and the KV of every running sequence; tokens of prompts take time of their own.

    Args:
        weights_s: Time in which the device reads all weights.
        block_s: Time in which it reads one block's KV, of all layers.
        link_ratio: Bandwidth of the link over that of the device's memory.
        token_s: Seconds for each token of a prompt.
    """

    def step_s(plan: StepPlan, num_read: int) -> float:
        return weights_s + block_s * num_read + token_s * plan.count_work()[1]

    return StreamingCosts(step_s, weights_s, block_s / link_ratio)
