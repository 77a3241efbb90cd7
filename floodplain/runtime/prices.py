"""What steps cost here, learned from the steps that ran: policies weigh a copy against computing with it."""

from __future__ import annotations

from floodplain.core.plan import StepPlan
from floodplain.core.view import Prices

_WEIGHT = 0.1
"""Of one step in the running means: the last twenty or so decide."""

_STALE = 20
"""Steps with prompts in a row after which the price of one without is no longer believed."""


class StepPrices:
    """Running means over completed steps. The same durations give the same prices, in the engine and the simulator."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._prefill_token_s: float | None = None
        self._num_mixed = 0  # steps since the last one without a prompt
        self._prices = Prices()

    @property
    def now(self) -> Prices:
        """The prices as of the last completed step; the same object until they change."""
        return self._prices

    def learn(self, plan: StepPlan, duration_s: float) -> None:
        """A step took this long. What a step with prompts takes beyond one without is theirs.

        Whoever comes back from swap space computes one token as a chunk: that is a decode. A few tokens of a prompt
        among many decodes say nothing about either. While every step carries a prompt nothing tells the two apart: then
        both prices grow or shrink by as much as the steps are longer or shorter than they say.
        """
        sizes = [len(chunk.token_ids) for chunk in plan.prefills]
        num_prefill = sum(size for size in sizes if size > 1)
        num_decodes = len(plan.decodes) + sizes.count(1)
        self._num_mixed += bool(num_decodes and num_prefill)
        if num_decodes and not num_prefill:
            self._num_mixed = 0
            self._step_s = _mean(self._step_s, duration_s)
        elif self._num_mixed > _STALE and self._step_s:
            self._scale(num_prefill, duration_s)
        elif num_prefill and num_prefill >= num_decodes:
            rest_s = max(0.0, duration_s - (self._step_s or 0.0)) if num_decodes else duration_s
            self._prefill_token_s = _mean(self._prefill_token_s, rest_s / num_prefill)
        else:
            return
        self._prices = Prices(self._step_s or 0.0, self._prefill_token_s or 0.0)

    def _scale(self, num_prefill: int, duration_s: float) -> None:
        step_s, token_s = self._step_s or 0.0, self._prefill_token_s or 0.0
        factor = _mean(1.0, duration_s / (step_s + num_prefill * token_s))
        self._step_s, self._prefill_token_s = step_s * factor, token_s * factor


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
