"""The virtual token counter (VTC): the tenant that was served least is admitted next.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588), the algorithm with
weights 1 for prompt tokens and 2 for output tokens. A tenant that comes back is lifted to the least counter in the
queue, or, if the queue is empty, to that of the tenant whose request left the queue last.

Left out: weighted tenants and length prediction. vLLM preempts, which the paper's engine does not: a preempted request
waits in its tenant's line, and is not charged for its prompt again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from benchmarks.peers.scheduler import PeerScheduler

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def find_tenant(request: Request) -> str:
    """Return the tenant of a request, ``tenant`` of its ``extra_args``; empty if it names none."""
    return str((request.sampling_params.extra_args or {}).get("tenant", ""))


class VtcScheduler(PeerScheduler):
    """Orders ``waiting``.

    Attributes:
        counters: Weighted tokens by tenant.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counters: dict[str, float] = defaultdict(float)
        self._last_tenant = ""

    def add_request(self, request: Request) -> None:
        """Lift the tenant's counter, if the tenant has no waiting request."""
        tenant, queued = find_tenant(request), {find_tenant(other) for other in self.waiting}
        if tenant not in queued:
            floor = min((self.counters[other] for other in queued), default=self.counters[self._last_tenant])
            self.counters[tenant] = max(self.counters[tenant], floor)
        super().add_request(request)

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Order requests as they would be picked one by one, each charged for its prompt."""
        lines: dict[str, deque[Request]] = defaultdict(deque)
        for request in self.waiting:
            lines[find_tenant(request)].append(request)
        counters, ordered = self.counters.copy(), []
        while lines:
            tenant = min(lines, key=lambda one: (counters[one], one))
            request = lines[tenant].popleft()
            counters[tenant] += PROMPT_WEIGHT * request.num_prompt_tokens
            ordered.append(request)
            if not lines[tenant]:
                del lines[tenant]
        self.arrange(ordered)
        return ()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Charge tenants for prompts that were admitted, and for output tokens."""
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            self._last_tenant = find_tenant(request)
            self.counters[self._last_tenant] += PROMPT_WEIGHT * request.num_prompt_tokens
        for request in map(self.requests.__getitem__, output.num_scheduled_tokens):
            if not request.is_prefill_chunk:
                self.counters[find_tenant(request)] += OUTPUT_WEIGHT
        return output
