"""Streamed inputs: requests whose prompt goes on after an answer. A part of ``compat``.

Between two inputs vLLM leaves such a request its blocks, so that in a small pool requests wait for each other without
end. Here it is parked if others lack blocks: preempted, with its KV in swap space, until its next input arrives.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class StreamedInputScheduler(AsyncScheduler):
    """vLLM's scheduler, which can preempt requests that wait for input."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parked: dict[str, int] = {}  # requests that wait for input without blocks: their tokens that stay
        self._renewed: set[str] = set()  # requests with an input that no worker has seen
        self._left: list[Request] = []  # requests that were preempted when the last token of an answer arrived

    @abstractmethod
    def note_pause(self, request: Request, num_tokens: int) -> None:
        """Called when an answer has ended, but its request has not: its first ``num_tokens`` stay."""

    @property
    def idle(self) -> list[Request]:
        """Return requests that hold blocks and a place on the device, and wait for input; the longest idle first."""
        return [one for one in self.kv_holding_waiting if one.status == RequestStatus.WAITING_FOR_STREAMING_REQ]

    @property
    def num_idle(self) -> int:
        """Return the number of ``idle``."""
        return int(self.num_waiting_for_streaming_input) - len(self._parked)

    def park(self, request: Request) -> None:
        """Preempt an idle request."""
        self._parked[request.request_id] = request.num_computed_tokens
        self.kv_holding_waiting.remove_request(request)
        request.status = RequestStatus.RUNNING  # as vLLM expects of what it preempts
        self._preempt_request(request, time.monotonic())
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ

    # -- what vLLM calls -------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step, as vLLM does. Parked requests take no place on the device."""
        self.num_waiting_for_streaming_input -= len(self._parked)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_waiting_for_streaming_input += len(self._parked)
        self._renewed.difference_update(output.num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Finish a step, as vLLM does, which forgets requests whose answer ended while they were preempted."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        left, self._left = self._left, []
        for request in left:
            if not request.is_finished():
                self._enqueue_waiting_request(request)
        return outputs

    def get_num_unfinished_requests(self) -> int:
        """Return the requests that need steps, as vLLM does; while it is paused, it counts only those with blocks."""
        num_hidden = len(self._parked) if self.pause_state is PauseState.PAUSED_NEW else 0
        return int(super().get_num_unfinished_requests()) + num_hidden

    def _handle_stopped_request(self, request: Request) -> bool:
        num_tokens = request.num_computed_tokens - request.num_output_placeholders
        if request.resumable and not request.num_computed_tokens:
            num_tokens = self._parked[request.request_id] = request.num_tokens - 1
            self._left.append(request)
        is_ended: bool = super()._handle_stopped_request(request)
        if not is_ended:
            self.note_pause(request, num_tokens)
        return is_ended

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """Append the next input behind the tokens that stay; vLLM takes those without KV for discarded ones."""
        num_tokens = self._parked.pop(session.request_id, None)
        session.num_computed_tokens = session.num_computed_tokens if num_tokens is None else num_tokens
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = session.num_computed_tokens if num_tokens is None else 0
        self._renewed.add(session.request_id)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a waiting request may begin. To workers, one with a new input must be a new request."""
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        if is_ready and request.request_id in self._renewed:
            request.status = RequestStatus.WAITING
        return is_ready

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._parked.pop(request.request_id, None)
        self._renewed.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)
