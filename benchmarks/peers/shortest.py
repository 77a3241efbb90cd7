"""Shortest prompt first, with ageing: a second of waiting counts as a number of prompt tokens less.

Source: https://github.com/sgl-project/sglang/pull/30806 (effective length = uncached prompt tokens - ageing x seconds
waited); https://github.com/vllm-project/vllm/pull/29366 and issue 29406 propose the same idea for vLLM with a weighted
score. Preempted requests come first, as in vLLM's pull request 51375.

Left out: hits of the prefix cache, which these benchmarks switch off.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.request import Request, RequestStatus

from benchmarks.peers.scheduler import PeerScheduler

AGEING_TOKENS_PER_S = 5.0
"""A prompt of 300 tokens overtakes a new one of 100 after 40 s. Of 5, 20 and 80, the best on seed 1."""


class ShortestScheduler(PeerScheduler):
    """Orders ``waiting``."""

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Put preempted requests first, then the shortest aged prompt."""

        def rank(request: Request) -> tuple[bool, float]:
            waited_s = now_s - request.arrival_time
            length = request.num_prompt_tokens - AGEING_TOKENS_PER_S * waited_s
            return request.status is not RequestStatus.PREEMPTED, length

        self.arrange(sorted(self.waiting, key=rank))
        return ()
