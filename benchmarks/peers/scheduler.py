"""vLLM's scheduler with one hook before each step, for rules of other systems."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import ceil
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class PeerScheduler(Scheduler):
    """A base for ``--scheduler-cls``, with vLLM's policy ``fcfs``.

    vLLM admits ``waiting`` from its front until a request does not fit, and preempts the last of ``running`` if blocks
    run out. So an order of both is a policy.

    Attributes:
        known: What an operator tells the scheduler, ``peer`` of ``--additional-config``: ``tpot_goal_s``, and the
            seconds ``base_s`` of a step, ``decode_s`` of each decode in it, ``prefill_token_s`` of each prompt token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[str, float] = dict(self.vllm_config.additional_config["peer"])

    def prepare(self, now_s: float) -> Iterable[Request]:
        """Order and preempt before a step; return the waiting requests that this step must not admit.

        Args:
            now_s: On the clock of ``Request.arrival_time``.
        """
        raise NotImplementedError

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan a step, as vLLM does."""
        held = list(self.prepare(self.now_s()))
        self.arrange([request for request in self.waiting if request not in held] if held else self.waiting)
        output = super().schedule(*args, **kwargs)
        self.waiting.extend(held)
        return output

    def now_s(self) -> float:
        """Return the time on the clock of ``Request.arrival_time``."""
        return time.time()

    def arrange(self, requests: Iterable[Request]) -> None:
        """Make these the waiting requests, in this order."""
        ordered = list(requests)
        self.waiting.clear()
        self.waiting.extend(ordered)

    def send_away(self, request: Request) -> None:
        """Preempt a running request. Its KV is lost."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def count_blocks(self, num_tokens: int) -> int:
        """Return the KV blocks of that many tokens."""
        return ceil(num_tokens / self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks."""
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def num_blocks(self) -> int:
        """All KV blocks that requests can have; vLLM keeps one for padding."""
        return int(self.kv_cache_config.num_blocks) - 1
