"""All names of vLLM that it may change without notice. For another version, check here and in ``compat_*``.

``SteeredScheduler`` is vLLM's own scheduler, which still allocates, batches and streams. A subclass decides here which
waiting requests it sees, how many tokens each request gets in a step, what is preempted, and what happens then.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from floodplain.core.cache_groups import CacheKind
from floodplain.core.errors import UserError
from floodplain.plugins.vllm.compat_blocks import BlockFinder
from floodplain.plugins.vllm.compat_names import find_groups
from floodplain.plugins.vllm.compat_streamed_inputs import StreamedInputScheduler
from floodplain.plugins.vllm.refusal import refusals_in_one_line
from floodplain.plugins.vllm.rows import Limits
from floodplain.plugins.vllm.turn_queue import TurnQueue


class SteeredScheduler(StreamedInputScheduler):
    """vLLM's scheduler with hooks for a subclass. If vLLM is so configured, steps are planned ahead of tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_kv_load_failures = True  # a failed copy is computed again, whatever vLLM's default is
        self._queue, self._holding = TurnQueue(), TurnQueue()
        self.waiting, self.kv_holding_waiting = self._queue, self._holding
        self.is_resetting = False
        self.is_async = bool(self.scheduler_config.async_scheduling)
        self._is_on_cpu = bool(current_platform.is_cpu())
        with refusals_in_one_line():
            self.groups = find_groups(self.kv_cache_config)
            self._expect_whole_hits()
            self._expect_whole_prompts()
            self._expect_room_for_drafts()
        self._spec_decode_step_blocks = 0  # a policy has left room for drafts
        self.finder = BlockFinder(self.kv_cache_manager, self.groups, self.hash_block_size)

    def _expect_whole_hits(self) -> None:
        """Refuse hits of the prefix cache that end within a block, which vLLM copies while we restore others."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        is_split = any(one.cache_hit_alignment_tokens % one.block_size for one in managers)
        if is_split and self.cache_config.enable_prefix_caching:
            raise UserError(
                "hits of the prefix cache within a block are not supported: leave --prefix-match-unit out,"
                " or pass --no-enable-prefix-caching"
            )

    def _expect_whole_prompts(self) -> None:
        """Refuse a limit on prompts' tokens in a step where some prompts are not split: these would wait for ever."""
        config = self.scheduler_config
        if config.long_prefill_token_threshold and (self._is_on_cpu or not config.enable_chunked_prefill):
            raise UserError(
                "prompts that may not be split (without chunked prefill, or with a seed on CPUs) do not go with"
                " --long-prefill-token-threshold: leave it out"
            )

    def _expect_room_for_drafts(self) -> None:
        """Refuse models whose drafts change what they keep, and steps without room for the drafts of all requests."""
        if not self.num_spec_tokens:
            return
        if any(group.kind is CacheKind.STATE for group in self.groups):
            raise UserError("drafts for models with states are not supported: leave --speculative-config out")
        if self.num_prefill_lookahead > 1:
            raise UserError("drafts of several MTP modules are not supported: set num_speculative_tokens to 1")
        needed = self.max_num_active_reqs * (1 + self.num_spec_tokens)
        if self._find_step_tokens() < needed:
            needed += self.scheduler_config.max_num_batched_tokens - self._find_step_tokens()
            raise UserError(
                f"{self.max_num_active_reqs} requests with {self.num_spec_tokens} drafts each need steps of"
                f" {needed} tokens: pass --max-num-batched-tokens {needed}, or lower --max-num-seqs"
            )

    def _find_step_tokens(self) -> int:
        """Return the most tokens of a step, without those that drafters insert."""
        speculative = self.vllm_config.speculative_config
        num_inserted = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
        most: int = self.scheduler_config.max_num_batched_tokens - num_inserted * self.max_num_active_reqs
        return min(most, int(self.max_num_scheduled_tokens))

    # -- for a subclass --------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self) -> Iterable[str]:
        """Called before each step; returns the requests that may be admitted, in order."""

    @abstractmethod
    def cap(self, request_id: str, num_tokens: int) -> int:
        """Return how many of these tokens, none of them a draft, a request may compute in this step."""

    @abstractmethod
    def note_arrival(self, request: Request) -> None:
        """Called for each new request."""

    @abstractmethod
    def note_finish(self, request: Request, *, is_loading: bool) -> None:
        """Called when a request has ended, or was aborted; ``is_loading``: a copy or load still fills its blocks."""

    @abstractmethod
    def note_departure(self, request: Request) -> None:
        """Called when a request is preempted; its blocks are still its own."""

    @abstractmethod
    def note_step(self, output: SchedulerOutput) -> None:
        """Called when a step is planned."""

    @abstractmethod
    def note_end(self, output: SchedulerOutput) -> None:
        """Called when a step has ended, and its tokens are known."""

    @abstractmethod
    def find_owner(self, arrival: str) -> str | None:
        """Return the request of an inbound copy, by the name that its worker reports; None if it waits no more."""

    @abstractmethod
    def void_copies(self) -> None:
        """Forget all computed KV that is in swap space, or on its way: it is invalid."""

    @property
    @abstractmethod
    def fetching(self) -> set[str]:
        """Return the requests that wait for inbound copies, or ended while they did."""

    @property
    @abstractmethod
    def held_blocks(self) -> Sequence[Any]:
        """Return blocks that copies hold, once for each of those copies."""

    @property
    def deferred_blocks(self) -> list[Any]:
        """Return blocks that only an outstanding step holds, which may still write them; freed when it ends."""
        return [block for _, blocks in self.deferred_frees for block in blocks]

    @property
    def num_queued(self) -> int:
        """Return the number of requests in vLLM's waiting queue, swapped ones included."""
        return len(self._queue)

    @property
    def holding(self) -> list[Request]:
        """Return waiting requests that hold blocks, into which copies go; not those that wait for input."""
        return [one for one in self._holding if one.status != RequestStatus.WAITING_FOR_STREAMING_REQ]

    def read_limits(self) -> Limits:
        """Return the limits that vLLM was configured with."""
        return Limits(
            self.finder.num_blocks,
            self.groups,
            self._find_step_tokens(),
            self.max_num_active_reqs,
            self.max_model_len,
            self.num_spec_tokens + self.num_lookahead_tokens,
        )

    def count_drafts(self, arrived: Sequence[Request]) -> int:
        """Return the drafts to verify in the next step; vLLM fills up requests whose copies have ended."""
        if not self.num_spec_tokens:
            return 0
        return sum([len(request.spec_token_ids) for request in self.running], int(self.num_spec_tokens) * len(arrived))

    def send_away(self, request: Request) -> None:
        """Preempt a running request."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def take_arrived(self) -> tuple[list[Request], list[Request]]:
        """Return requests whose inbound copies have ended, and those whose have not.

        A request whose copies failed has no blocks any more, and goes to the waiting queue. One whose next input has
        come is among the former; one that waits for input is in neither.
        """
        arrived, loading = [], []
        for request in self._holding:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                continue
            if not self._handle_blocked_waiting_request(request):
                loading.append(request)
            elif request.num_computed_tokens:
                arrived.append(request)
            else:
                self._holding.remove_request(request)
                self.deferred_waiting.discard(request)
                self._queue.add_request(request)
        return arrived, loading

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted. While vLLM is paused, no running request must make room for one."""
        return bool(self.pause_state is PauseState.UNPAUSED)

    def take_queued(self) -> dict[str, Request | None]:
        """Return requests added to the waiting queue, or removed from it (None), since the last call."""
        self._holding.take_changed()  # all of those are in ``take_arrived``
        return self._queue.take_changed()

    def is_ready(self, request: Request) -> bool:
        """Whether a waiting request could begin; vLLM decides for one that waits for a condition."""
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False  # preempted with a step outstanding, whose token is delivered first
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return True
        if not self._handle_blocked_waiting_request(request):
            return False
        self.deferred_waiting.discard(request)
        return True

    def find_fitting(self, others: Sequence[Request] = ()) -> Callable[[Request], bool]:
        """Return a check whether a request's LoRA adapter fits beside those of ``others`` and on the device.

        vLLM 0.32 does not count the adapters of running requests that get no tokens in a step. Sessions that wait for
        input, or have got one and go on, take no place until they run.
        """
        if not self.lora_config:
            return lambda request: True
        most: int = self.lora_config.max_loras
        held = [request for request in self.holding if request.request_id not in self._renewed]
        adapters = {_adapter_of(request) for request in (*self.running, *held, *others)} - {None}
        return lambda request: len({*adapters, _adapter_of(request)} - {None}) <= max(most, len(adapters))

    # -- what vLLM calls -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request, as vLLM does. A session that goes on has its request already."""
        if request.request_id not in self.requests:
            self.note_arrival(request)
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.note_finish(request, is_loading=delay_free_blocks)
        return super()._free_request(request, delay_free_blocks)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step, as vLLM does, with only the planned requests admitted."""
        newcomers = self.plan()
        # vLLM stops at the first request that holds blocks already and gets no tokens.
        arrived = [request.request_id for request in self._holding if self.cap(request.request_id, 1)]
        fitting, held = self._fit_adapters([*arrived, *newcomers]), {*arrived}
        admitted = [one for one in fitting if one not in held]
        with self._holding.let_in([one for one in fitting if one in held]), self._queue.let_in(admitted):
            output = super().schedule(throttle_prefills)
        self.note_step(output)
        return output

    def _fit_adapters(self, request_ids: Iterable[str]) -> list[str]:
        """Return the requests whose LoRA adapters fit together, and beside those that run."""
        fitting: list[Request] = []
        for request_id in request_ids:
            if self.find_fitting(fitting)(self.requests[request_id]):
                fitting.append(self.requests[request_id])
        return [request.request_id for request in fitting]

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Finish a step, as vLLM does, after copies' names are replaced by those of their requests."""
        report = model_runner_output.kv_connector_output
        if report is not None:
            report.finished_recving = self._find_owners(report.finished_recving)
            report.failed_recving = self._find_owners(report.failed_recving)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.note_end(scheduler_output)
        return outputs

    def _find_owners(self, arrivals: Iterable[str] | None) -> set[str]:
        return {owner for arrival in arrivals or () if (owner := self.find_owner(arrival)) is not None}

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the prefix cache, as vLLM does. Success leaves no KV to restore from, in swap space neither.

        vLLM requires that all blocks are free. Blocks that copies hold count as free during that check.
        """
        self.is_resetting = True
        try:
            if reset_running_requests:
                fetching = self.fetching
                self.void_copies()
                self._free_waiting(fetching)
                while self.running:  # here, so that it is known which blocks an outstanding step still writes
                    self._preempt_request(self.running.pop(), time.monotonic(), drop_stale_output=True)
            with self._free_held():
                is_reset: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            self.is_resetting = False
        if is_reset:
            self.void_copies()
        return is_reset

    def _free_waiting(self, fetching: set[str]) -> None:
        """Free the blocks of requests that do not run: those that copies filled, fill still, or were to fill.

        Blocks that another connector still fills or reads stay. With such a load under way, vLLM's reset fails.
        """
        arrived = self.finished_recving_kv_req_ids | self.failed_recving_kv_req_ids
        for request in self.idle:
            self.park(request)
        for request in self._holding:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id not in fetching | arrived:
                continue
            self._holding.remove_request(request)
            self.deferred_waiting.discard(request)
            self.finished_recving_kv_req_ids.discard(request.request_id)
            self.failed_recving_kv_req_ids.discard(request.request_id)
            self._inflight_prefills.discard(request)
            self._set_kv_fetch_stage(request, None)
            self._free_request_blocks(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            self._queue.add_request(request)
        for request in list(self.requests.values()):
            if request.is_finished() and request.request_id in fetching:
                self._free_blocks(request)

    @contextmanager
    def _free_held(self) -> Iterator[None]:
        """While the context is open, blocks that only copies or outstanding steps hold are free; allocate none."""
        held = [*self.held_blocks, *self.deferred_blocks]
        self.finder.pool.free_blocks(held)
        try:
            yield
        finally:
            self.finder.pool.touch(held)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Record a planned step; with async scheduling, placeholders stand for its tokens."""
        (AsyncScheduler if self.is_async else Scheduler)._update_after_schedule(self, scheduler_output)

    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> tuple[list[int], bool]:
        """Record a step's tokens; with async scheduling, they replace its placeholders.

        vLLM restores nothing of requests whose prompts' log probabilities it must compute, until their first token.
        """
        base = AsyncScheduler if self.is_async else Scheduler
        known: tuple[list[int], bool] = base._update_request_with_output(self, request, *args, **kwargs)
        request.skip_reading_prefix_cache = False
        return known

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.note_departure(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of these tokens a request computes in this step: at most its ``cap``, or its prompt whole.

        Drafts come behind all other tokens: they are computed if those are.
        """
        num_known = request.num_tokens + request.num_output_placeholders - num_computed_tokens
        num_tokens = self.cap(request.request_id, min(num_new_tokens, num_known))
        if not num_tokens:
            return 0
        if not self._keeps_whole(request):
            return num_new_tokens if num_tokens >= num_known else min(num_tokens, num_new_tokens)
        num_left = request.num_tokens - num_computed_tokens
        fits_later = num_new_tokens < num_left <= self.max_num_scheduled_tokens
        return 0 if fits_later else num_new_tokens

    def _keeps_whole(self, request: Request) -> bool:
        """Whether a prompt must be computed in one step. vLLM's runner for CPUs splits none with a seed of its own."""
        if not self.scheduler_config.enable_chunked_prefill:
            return True
        sampling = request.sampling_params
        return self._is_on_cpu and sampling is not None and sampling.seed is not None

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Limit a request's tokens: vLLM's last decision on their number."""
        num_tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self._limit(request, num_computed_tokens, num_tokens)

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Encode what the tokens of this step need, and no more; called before ``_reserve_prefill_lookahead``."""
        num_tokens = self._limit(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(request, num_computed_tokens, num_tokens, *args, **kwargs)

    def _inflight_prefill_reserved_blocks(self) -> int:
        """Return 0: a policy has already left room for the running requests."""
        return 0


def local_tokens_in(output: SchedulerOutput) -> dict[str, int]:
    """Return how many leading tokens each request that is new in a step did not have to compute."""
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def _adapter_of(request: Request) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request else None


def was_aborted(request: Request) -> bool:
    """Whether a request's client ended it; False if one of its stop strings may have, which another process finds."""
    sampling = request.sampling_params
    may_be_stopped = sampling is not None and sampling.stop and request.num_output_tokens
    return bool(request.status == RequestStatus.FINISHED_ABORTED) and not may_be_stopped


def has_failed(request: Request) -> bool:
    """Whether an error ended a request."""
    return bool(request.status == RequestStatus.FINISHED_ERROR)


def num_tokens_in(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens each request of a step computes, drafts included."""
    num_tokens: dict[str, int] = output.num_scheduled_tokens
    return num_tokens


def drafts_in(output: SchedulerOutput) -> dict[str, list[int]]:
    """Return the drafts of a step, for each request that has some."""
    drafts: dict[str, list[int]] = output.scheduled_spec_decode_tokens
    return drafts
