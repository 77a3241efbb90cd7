"""An admission gate: requests wait outside of vLLM while its KV cache or its queue is too full.

Source: the saturation detector of the Gateway API Inference Extension, which llm-d's scheduler builds on
(https://github.com/kubernetes-sigs/gateway-api-inference-extension, ``pkg/epp/saturationdetector``), with its default
thresholds. Requests outside are let in by arrival.

Left out: metrics that are up to 200 ms old (here they are exact), the choice among several replicas, and flow control's
priorities and fairness. No request is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request

from benchmarks.peers.scheduler import PeerScheduler

MAX_QUEUE = 5
MAX_KV_USAGE = 0.8


class GateScheduler(PeerScheduler):
    """Holds the requests outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inside: set[str] = set()

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Let requests in while vLLM is not saturated; return those outside."""
        self._inside.intersection_update(self.requests)
        outside = [request for request in self.waiting if request.request_id not in self._inside]
        num_inside = len(self.waiting) - len(outside)
        is_open = self.kv_cache_manager.usage <= MAX_KV_USAGE
        num_more = min(len(outside), max(0, MAX_QUEUE + 1 - num_inside)) if is_open else 0
        self._inside |= {request.request_id for request in outside[:num_more]}
        return outside[num_more:]
