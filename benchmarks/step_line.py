"""A straight line for the time of a step, of machines of which no more is known."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepLine:
    """The time of a step in seconds as a linear function of its work (least squares over measured steps)."""

    base_s: float
    decode_s: float
    prefill_token_s: float

    def time_s(self, plan: StepPlan) -> float:
        """Seconds of a plan; 0 for a plan that only moves KV."""
        num_decodes, num_prefill = plan.count_work()
        if not (num_decodes or num_prefill):
            return 0.0
        return self.base_s + self.decode_s * num_decodes + self.prefill_token_s * num_prefill
