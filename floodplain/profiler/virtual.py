"""The step loop in virtual time, as a target to profile and as the device that an engine's flags describe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from floodplain.core.errors import RequestRefused
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.core.tiers import Link, Tier
from floodplain.cost.link import LINKS
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import HARDWARE_PREFIX, EngineConfig
from floodplain.engine.pool_limits import find_limits
from floodplain.engine.swap import DEFAULT_POOL_FACTOR
from floodplain.model.network.config import ModelConfig
from floodplain.model.weights.open_model import ModelSource
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.registry import make_policy
from floodplain.profiler.goals import Answer
from floodplain.profiler.targets import Load, Seen
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.serving import Served, VirtualDevice, serve
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadRequest

DEFAULT_LINK = "pcie5"
"""The default link to swap space, without ``--hardware``. Virtual links are as fast as the real ones."""


def make_device(config: EngineConfig, model: ModelConfig, step_time_s: Callable[[StepPlan], float]) -> VirtualDevice:
    """The device that the engine flags describe; those of how to compute are ignored, ``kv_memory`` is given.

    UserError if the pool is too small for one request.
    """
    assert config.kv_memory is not None
    block_bytes = kv_bytes_per_token(model, config.dtype) * config.block_tokens
    num_blocks = -(-config.kv_memory // block_bytes)
    limits = find_limits(config, model, num_blocks, block_bytes)
    swap_bytes = config.swap_memory or DEFAULT_POOL_FACTOR * num_blocks * block_bytes
    profile = LINKS[(config.hardware or DEFAULT_LINK).removeprefix(HARDWARE_PREFIX)]
    return VirtualDevice(
        step_time_s=step_time_s,
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        config=LoopConfig(
            max_model_len=limits.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=sys.maxsize,
            block_bytes=block_bytes,
        ),
        link=Link(Tier.HOST, profile.peak_bandwidth, profile.outbound.latency_s),
        num_swap_slots=0 if config.swap == "none" else swap_bytes // block_bytes,
        caches_prefixes=config.enable_prefix_caching,
    )


def to_request(asked: LoadRequest) -> Request:
    """The request. Its output ends by length, because no step samples a token that could end it."""
    return Request(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True),
        arrival_s=asked.arrival_s,
    )


def servable(requests: Iterable[Request], device: VirtualDevice) -> tuple[list[Request], str | None]:
    """(requests that the device can serve at all, why the first of the others cannot be)."""
    loop = device.make_loop(FcfsPolicy(), seed=0)
    taken, error = [], None
    for request in requests:
        try:
            loop.check(request)
            taken.append(request)
        except RequestRefused as refusal:
            error = error or str(refusal)
    return taken, error


class VirtualServer:
    """Serves requests in virtual time, on the device of an engine's flags. UserError: no request fits the pool."""

    def __init__(self, config: EngineConfig, source: ModelSource, cost: StepCost, load: Load) -> None:
        self._config = config
        self._cost = cost
        self._load = load
        self._tokenizer: PromptTokenizer = source.load_tokenizer()
        self._device = make_device(config, source.config, StepTimer(cost).time_s)

    def _serve(
        self, requests: list[Request], on_step: Callable[[LoopState, float], None] | None = None, **changes: Any
    ) -> Served:
        device = replace(self._device, step_time_s=StepTimer(self._cost).time_s, **changes)  # a timer is of one loop
        policy = make_policy(self._config.policy, self._config.sharing_settings())
        return serve(requests, policy, device, on_step=on_step)


class VirtualTarget(VirtualServer):
    """A model whose tries are computed, with a cost of ``machine``; a repeated try has the same result."""

    is_virtual = True

    def __init__(self, config: EngineConfig, source: ModelSource, cost: StepCost, machine: str, load: Load) -> None:
        super().__init__(config, source, cost, load)
        self.machine = machine

    def run(self, rate: float, seed: int, duration_s: float) -> Seen:
        """Serve the requests of one try in virtual time; return what was seen."""
        asked = [to_request(one) for one in self._load.make(self._tokenizer, rate, seed, duration_s)]
        served, error = servable(asked, self._device)
        done = self._serve(served)
        answers = [Answer(sent_s=life.arrival_s, token_times_s=life.token_times_s) for life in done.lifecycles]
        refused = [Answer(sent_s=0.0, token_times_s=(), is_whole=False)] * (len(asked) - len(served))
        block_bytes = self._device.config.block_bytes
        return Seen(
            answers=answers + refused,
            peak_kv_bytes=done.peaks.pool_blocks * block_bytes,
            kv_bytes=self._device.num_blocks * block_bytes,
            error=error,
        )
