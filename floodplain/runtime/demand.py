"""Learns the demand: lengths of prompts and answers, the rate at which requests end, and the wait under FCFS.

The mean answer counts live streams as censored observations (the product-limit estimator: Kaplan and Meier, 1958),
since short answers end first when a load begins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from floodplain.core.view import Demand

NUM_RECENT = 500
"""Number of recent requests whose lengths are kept."""

RATE_S = 4.0
"""Time constant, in seconds, of the token rate."""

_SMOOTHING = 0.05
"""Weight of the newest step in the mean time of a step."""

_PAUSED = 0.5
"""Part of its work that a swapped request still needs on average: under FCFS a new request waits for it, too."""


class Recent:
    """The last ``size`` numbers, sorted. Adding one costs a bisection and an insertion into a list."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_age: deque[int] = deque()
        self.sorted: list[int] = []

    def add(self, number: int) -> None:
        """Add a number, and drop the oldest if there are more than ``size``."""
        self._by_age.append(number)
        insort(self.sorted, number)
        if len(self._by_age) > self._size:
            del self.sorted[bisect_left(self.sorted, self._by_age.popleft())]


class DemandMeter:
    """The current demand. Equal events give equal numbers, in the engine and in the simulator."""

    def __init__(self) -> None:
        self._outputs, self._prompts = Recent(NUM_RECENT), Recent(NUM_RECENT)
        self._mean_output = self._token_rate = self._longest_wait_s = self._step_s = 0.0
        self._demand = Demand()

    @property
    def now(self) -> Demand:
        """The demand after the last event; the same object until the next one."""
        return self._demand

    def arrive(self, num_prompt: int, num_waiting: int, num_paused: int, live_outputs: Iterable[int]) -> None:
        """Note the arrival of a request.

        Args:
            num_waiting: Requests that wait, itself included.
            num_paused: Requests in swap space.
            live_outputs: Output tokens of each live stream so far.
        """
        self._prompts.add(num_prompt)
        self._mean_output = mean_length(self._outputs.sorted, sorted(number for number in live_outputs if number))
        if self._end_rate:
            wait_s = (num_waiting - 1 + _PAUSED * num_paused) / self._end_rate
            self._longest_wait_s = max(self._longest_wait_s, wait_s if num_waiting > 1 else 0.0)
        self._publish()

    def learn(
        self, duration_s: float, num_tokens: int, ended: Iterable[int], num_waiting: int, num_paused: int
    ) -> None:
        """Note a step that generated ``num_tokens``; ``ended`` has the output tokens of each request that ended."""
        for number in ended:
            self._outputs.add(number)
        if duration_s > 0:
            self._step_s += (_SMOOTHING if self._step_s else 1.0) * (duration_s - self._step_s)
            if num_waiting or num_paused:
                gain = min(1.0, duration_s / RATE_S) if self._token_rate else 1.0
                self._token_rate += gain * (num_tokens / duration_s - self._token_rate)
        if not (num_waiting or num_paused):
            self._longest_wait_s = 0.0
        self._publish()

    @property
    def _end_rate(self) -> float:
        return self._token_rate / self._mean_output if self._mean_output else 0.0

    def _publish(self) -> None:
        prompts = self._prompts.sorted
        median_prompt = prompts[len(prompts) // 2] if prompts else 0
        self._demand = Demand(self._mean_output, median_prompt, self._end_rate, self._longest_wait_s, self._step_s)


def mean_length(ended: Sequence[int], live: Sequence[int]) -> float:
    """The mean of ``ended`` lengths and of ``live``, censored ones (product-limit estimator); both are sorted."""
    marks = sorted([*((number, False) for number in ended), *((number, True) for number in live)])
    surviving, mean, last, num_left = 1.0, 0.0, 0, len(marks)
    for number, is_live in marks:
        mean += surviving * (number - last)
        if not is_live:
            surviving *= 1 - 1 / num_left
        last, num_left = number, num_left - 1
    return mean
