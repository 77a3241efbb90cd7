"""What steps cost here, learned from the steps that ran: policies weigh a copy against computing with it.

A step is priced as a line: so much for itself, for each decode and for each prompt token. A Kalman filter follows the
line as it drifts; errors count relative to the step. A price stays as it is while nothing is paid for it, and where
steps cannot tell two of them apart, both follow.

What part of the work prompts are is reckoned from the prompts of requests that ended, and the decodes of all: those
that end first when a load begins are the short ones, and alone they would make outputs look shorter than they are.
"""

from __future__ import annotations

from floodplain.core.view import Prices
from floodplain.runtime.line import Line

_GUESS = (1.0, 1 / 16, 1 / 8)
"""Of the first step's time: what a step itself, a decode and a prompt token may cost, roughly, until steps tell."""

_NOISE = 0.1
"""How far a step may be off its price, as a part of it."""

_SMOOTHING = 0.1
"""Weight of the newest step in the mean number of decodes."""

_FORGETTING = 0.02
"""The part of what prompts and decodes were counted that is forgotten whenever a request ends."""

_DRIFT = 0.015
"""How far a price may move from one step that has to pay it to the next, as a part of it."""


class StepPrices:
    """Prices as of now. The same durations give the same prices, in the engine and the simulator."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._num_decodes: float | None = None  # a running mean over steps that had some
        self._has_prefill = False
        self._num_prompt_tokens = 0.0  # of requests that ended lately
        self._num_output_tokens = 0.0  # those of all requests meanwhile, but for first ones
        self._prices = Prices()

    @property
    def now(self) -> Prices:
        """The prices as of the last completed step; the same object until they change."""
        return self._prices

    def learn(self, num_decodes: int, num_prefill: int, duration_s: float) -> None:
        """A step of so many decodes and prompt tokens took this long."""
        if not (num_decodes or num_prefill) or duration_s <= 0:
            return
        self._line = self._line or _first_line(duration_s)
        self._line.learn((1.0, float(num_decodes), float(num_prefill)), duration_s)
        self._num_output_tokens += num_decodes
        if num_decodes:
            mean = num_decodes if self._num_decodes is None else self._num_decodes
            self._num_decodes = mean + _SMOOTHING * (num_decodes - mean)
        self._has_prefill = self._has_prefill or num_prefill > 0
        self._prices = self._price(self._line.weights)

    def learn_end(self, num_prompt: int) -> None:
        """A request ended whose prompt had so many tokens computed."""
        self._num_prompt_tokens += num_prompt - _FORGETTING * self._num_prompt_tokens
        self._num_output_tokens -= _FORGETTING * self._num_output_tokens

    def _price(self, weights: list[float]) -> Prices:
        base_s, decode_s, token_s = weights
        step_s = 0.0 if self._num_decodes is None else max(0.0, base_s + decode_s * self._num_decodes)
        token_s = max(0.0, token_s) if self._has_prefill else 0.0
        lone_step_s = max(0.0, base_s + decode_s) if step_s else 0.0
        return Prices(step_s, token_s, self._prompt_share(step_s, token_s), lone_step_s)

    def _prompt_share(self, step_s: float, token_s: float) -> float:
        prompts_s = self._num_prompt_tokens * token_s
        if not (self._num_decodes and step_s and prompts_s):
            return 0.0
        return prompts_s / (prompts_s + self._num_output_tokens * step_s / self._num_decodes)


def _first_line(duration_s: float) -> Line:
    """Before the first step anything may cost nothing, or as much as ``_GUESS`` says."""
    return Line([0.0] * len(_GUESS), [share * duration_s for share in _GUESS], noise=_NOISE, drift=_DRIFT)
