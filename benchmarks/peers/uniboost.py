"""UniBoost: earlier arrival goes first, with a boost that shrinks as a request gets service.

Source: Li et al., "Beyond Prediction: Tail-Aware Scheduling for LLM Inference" (ICML 2026, arXiv 2606.18431): its
abstract, its project page, a public summary of its sections, and the formula and constants of the authors' public fork
of SGLang (``schedule_policy.py``). The paper's full text was not available, so details of the last two may differ.

- Rank: arrival - boost(work), with boost(w) = ln(1 / (1 - exp(-gamma w))) / gamma, for running and waiting requests
  alike. Work is the prompt and the output so far, in seconds of prefill. A large gamma is FCFS, 0 is least attained
  service.
- MemGuard: a request's output counts at geometric thresholds only, and a request is not preempted before it has passed
  one since it was admitted. A waiting request preempts others only if its rank is better by more than the seconds that
  computing them again takes.
- gamma-Ada: gamma follows the tail of the finished requests' latencies, down if p99 is far above p95.

Left out: swapping (a preempted request is computed again), the prefix cache, SLO classes. gamma is adapted after 20
finished requests instead of 200, since a load here has 40 to 90.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import expm1, log
from statistics import quantiles
from typing import Any

from vllm.v1.request import Request

from benchmarks.peers.scheduler import PeerScheduler

GAMMA_PER_TOKEN = 10.0 * 64e-6
"""At the start. The fork has 10 per second, and 64 microseconds of work per token."""
LEAST_FACTOR, MOST_FACTOR = 0.1, 20.0
TAIL_SENSITIVITY, SMOOTHING, INTERVAL_S, LEAST_SAMPLES = 4.0, 0.3, 5.0, 20
FIRST_THRESHOLD = 16
"""Output tokens; each threshold is twice the one before."""


def boost_s(work_s: float, gamma: float) -> float:
    """Return the boost of a request with that much work, in seconds; it falls as work grows."""
    return -log(-expm1(-gamma * work_s)) / gamma


def threshold(num_output_tokens: int) -> int:
    """Return the largest threshold that an output has reached; 0 below the first."""
    reached = 0
    while max(FIRST_THRESHOLD, 2 * reached) <= num_output_tokens:
        reached = max(FIRST_THRESHOLD, 2 * reached)
    return reached


class UniBoostScheduler(PeerScheduler):
    """Orders both queues, and preempts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_s = self.known["prefill_token_s"]
        self._first_gamma = self._gamma = GAMMA_PER_TOKEN / self._token_s
        self._admitted_at: dict[str, int] = {}
        self._latencies_s: list[float] = []
        self._adapted_s = 0.0

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Rank all requests; preempt running ones for the best waiting one."""
        self._adapt(now_s)
        self._admitted_at = {
            request.request_id: self._admitted_at.get(request.request_id, threshold(request.num_output_tokens))
            for request in self.running
        }
        if self.waiting:
            self._make_room(min(self.waiting, key=self._rank))
        self.running.sort(key=self._rank)
        self.arrange(sorted(self.waiting, key=self._rank))
        return ()

    def _rank(self, request: Request) -> float:
        num_tokens = request.num_prompt_tokens + threshold(request.num_output_tokens)
        return float(request.arrival_time) - boost_s(num_tokens * self._token_s, self._gamma)

    def _make_room(self, request: Request) -> None:
        """Preempt the worst running requests, if those that may be preempted hold enough blocks."""
        missing = self.count_blocks(request.num_tokens) - self.num_free_blocks
        victims = []
        for other in sorted(self.running, key=self._rank, reverse=True):
            if missing > 0 and self._may_yield(other, request):
                victims.append(other)
                missing -= self.count_blocks(other.num_computed_tokens)
        if missing <= 0:
            for victim in victims:
                self.send_away(victim)

    def _may_yield(self, running: Request, waiting: Request) -> bool:
        has_run = threshold(running.num_output_tokens) > self._admitted_at[running.request_id]
        recompute_s = running.num_tokens * self._token_s
        return has_run and self._rank(running) - self._rank(waiting) > recompute_s

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._latencies_s.append(self.now_s() - request.arrival_time)
        return super()._free_request(request, *args, **kwargs)

    def _adapt(self, now_s: float) -> None:
        if len(self._latencies_s) < LEAST_SAMPLES or now_s - self._adapted_s < INTERVAL_S:
            return
        self._adapted_s = now_s
        cuts = quantiles(self._latencies_s, n=100, method="inclusive")
        target = MOST_FACTOR * self._first_gamma / (1.0 + TAIL_SENSITIVITY * (cuts[98] / cuts[94] - 1.0))
        self._gamma += SMOOTHING * (max(target, LEAST_FACTOR * self._first_gamma) - self._gamma)
