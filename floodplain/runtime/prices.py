"""What steps cost here, learned from the steps that ran: policies weigh a copy against computing with it.

A step is priced as a line: so much for itself, for each decode and for each prompt token. A Kalman filter follows the
line as it drifts; errors count relative to the step. A price stays as it is while nothing is paid for it, and where
steps cannot tell two of them apart, both follow. How long prompts and outputs are is learned from requests that finish.
"""

from __future__ import annotations

from floodplain.core.plan import StepPlan
from floodplain.core.view import Prices
from floodplain.runtime.line import Line

_GUESS = (1.0, 1 / 16, 1 / 8)
"""Of the first step's time: what a step itself, a decode and a prompt token may cost, roughly, until steps tell."""

_NOISE = 0.1
"""How far a step may be off its price, as a part of it."""

_SMOOTHING = 0.1
"""Weight of the newest step in the mean number of decodes."""

_LENGTH_SMOOTHING = 0.05
"""Weight of the newest request in the mean lengths of prompts and outputs."""

_DRIFT = 0.015
"""How far a price may move from one step that has to pay it to the next, as a part of it."""


class StepPrices:
    """Prices as of now. The same durations give the same prices, in the engine and the simulator."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._num_decodes: float | None = None  # a running mean over steps that had some
        self._has_prefill = False
        self._lengths: tuple[float, float] | None = None  # running means of computed prompt tokens and of output tokens
        self._prices = Prices()

    @property
    def now(self) -> Prices:
        """The prices as of the last completed step; the same object until they change."""
        return self._prices

    def learn(self, plan: StepPlan, duration_s: float) -> None:
        """A step took this long."""
        num_decodes, num_prefill = plan.count_work()
        if not (num_decodes or num_prefill) or duration_s <= 0:
            return
        self._line = self._line or _first_line(duration_s)
        self._line.learn((1.0, float(num_decodes), float(num_prefill)), duration_s)
        if num_decodes:
            mean = num_decodes if self._num_decodes is None else self._num_decodes
            self._num_decodes = mean + _SMOOTHING * (num_decodes - mean)
        self._has_prefill = self._has_prefill or num_prefill > 0
        self._prices = self._price(self._line.weights)

    def learn_lengths(self, num_prompt: int, num_output: int) -> None:
        """A request finished that had so many prompt tokens computed, and got so many tokens."""
        prompt, output = self._lengths or (num_prompt, num_output)
        self._lengths = (
            prompt + _LENGTH_SMOOTHING * (num_prompt - prompt),
            output + _LENGTH_SMOOTHING * (num_output - output),
        )

    def _price(self, weights: list[float]) -> Prices:
        base_s, decode_s, token_s = weights
        step_s = 0.0 if self._num_decodes is None else max(0.0, base_s + decode_s * self._num_decodes)
        token_s = max(0.0, token_s) if self._has_prefill else 0.0
        return Prices(step_s, token_s, self._prompt_share(step_s, token_s))

    def _prompt_share(self, step_s: float, token_s: float) -> float:
        if self._lengths is None or not (any(self._lengths) and self._num_decodes and step_s and token_s):
            return 0.0
        prompt_s, output_s = self._lengths[0] * token_s, self._lengths[1] * step_s / self._num_decodes
        return prompt_s / (prompt_s + output_s)


def _first_line(duration_s: float) -> Line:
    """Before the first step anything may cost nothing, or as much as ``_GUESS`` says."""
    return Line([0.0] * len(_GUESS), [share * duration_s for share in _GUESS], noise=_NOISE, drift=_DRIFT)
