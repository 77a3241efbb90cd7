"""Least computed first: if blocks run out, the request with the least computed tokens is preempted.

Source: https://github.com/vllm-project/vllm/pull/53723 (``preemption_victim="lcf"``) and its RFC, issue 54644. What a
preemption throws away is then least. Nothing is left out; requests are admitted in order of arrival, as there.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.request import Request

from benchmarks.peers.scheduler import PeerScheduler


class LeastComputedScheduler(PeerScheduler):
    """vLLM preempts the last of ``running``."""

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Put the request with the least computed tokens last."""
        self.running.sort(key=lambda request: -request.num_computed_tokens)
        return ()
