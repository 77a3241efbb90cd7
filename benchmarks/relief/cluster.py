"""Several instances behind one dispatcher in virtual time: with the engine's loops, ledgers and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

from floodplain.core.blocks import BlockLedger
from floodplain.core.free_blocks import BlockId
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request, SeqId
from floodplain.cost.pipeline import ChunkPrice
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.policy.dispatch import InstanceView, choose_instance
from floodplain.policy.drop import DropSizes
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.driver import StepDriver
from floodplain.runtime.handover import adopt
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.instance import Environment, dummy_result


class VirtualStages:
    """A loop whose depth is the number of stages, beside other events. It has no swap space.

    The leader plans when its stage is free; every stage runs one plan at a time.

    Attributes:
        loop: The step loop of the leader.
        lifecycles: Lifecycles of all requests, in order of submission.
        busy_s: Seconds that each stage computed.
    """

    def __init__(
        self, environment: Environment, loop: Loop, stage_times: Callable[[StepPlan], Sequence[float]]
    ) -> None:
        self.loop = loop
        self.lifecycles: dict[SeqId, Lifecycle] = {}
        self.busy_s = [0.0] * loop.state.config.depth
        self._environment = environment
        self._stage_times = stage_times
        self._driver = StepDriver(loop)
        self._free_s = [environment.now] * len(self.busy_s)
        self._on_paused: Callable[[], object] | None = None

    def submit(self, request: Request) -> SeqId:
        """Submit a request that arrives now and computes all of its known tokens."""
        seq_id = self._take_in(request)
        self.advance()
        return seq_id

    def adopt(self, request: Request, blocks: Sequence[BlockId], num_computed: int) -> SeqId:
        """Resume a request from KV in ``blocks``, which were held for it; if it may not run, it is recomputed."""
        seq_id = self._take_in(request)
        if not adopt(self.loop, seq_id, blocks, num_computed, self._environment.now):
            self.loop.state.ledger.free(blocks)
        self.advance()
        return seq_id

    def pause(self, then: Callable[[], object]) -> None:
        """Stop planning for good, and call ``then`` when no step is outstanding."""
        self._on_paused = then
        self._tell_if_paused()

    def advance(self) -> None:
        """Start all steps that can start now."""
        now = self._environment.now
        while self._on_paused is None and self._driver.has_room and self._free_s[0] <= now:
            plan = self._driver.next_plan(now)
            if not isinstance(plan, StepPlan):
                return
            end_s = now
            for stage, duration_s in enumerate(self._stage_times(plan)):
                end_s = self._free_s[stage] = max(end_s, self._free_s[stage]) + duration_s
                self.busy_s[stage] += duration_s
            self._environment.schedule(end_s, partial(self._complete, plan))
            self._environment.schedule(self._free_s[0], self.advance)

    def _take_in(self, request: Request) -> SeqId:
        seq_id = self.loop.submit(request)
        self.lifecycles[seq_id] = self.loop.state.sequences[seq_id].lifecycle
        return seq_id

    def _complete(self, plan: StepPlan) -> None:
        self._driver.complete(dummy_result(plan), self._environment.now)
        self._tell_if_paused()
        self.advance()

    def _tell_if_paused(self) -> None:
        if self._on_paused is not None and not self._driver.num_outstanding:
            self._on_paused()


class VirtualEngine(Protocol):
    """An engine that accepts requests: ``sim.instance.VirtualInstance`` or ``VirtualStages``."""

    loop: Loop
    lifecycles: dict[SeqId, Lifecycle]

    def submit(self, request: Request) -> SeqId:
        """Submit a request that arrives now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualModel:
    """A model on equal instances.

    Attributes:
        cost: Cost of a step through all layers.
        sizes: Sizes of layers and blocks.
        num_blocks: KV pool of an instance that has all layers.
        block_tokens: Tokens in a block.
        config: Limits of an instance's loop.
        hop_s: Seconds from one stage to the next.
        least_tokens: As in ``MicrobatchRule``.
    """

    cost: StepCost
    sizes: DropSizes
    num_blocks: int
    block_tokens: int
    config: LoopConfig
    hop_s: float = 0.0
    least_tokens: int = 256

    @property
    def token_bytes(self) -> float:
        """KV of a token in all layers."""
        return self.sizes.num_layers * self.sizes.block_bytes / self.block_tokens

    def make_stages(self, environment: Environment, num_stages: int, num_blocks: int) -> VirtualStages:
        """An instance (one stage), or a pipeline of equally expensive stages, with FCFS."""
        config = replace(self.config, depth=num_stages, max_num_seqs=num_stages * self.config.max_num_seqs)
        policy = FcfsPolicy(microbatches=MicrobatchRule("even", ChunkPrice(self.cost), self.least_tokens))
        ledger = BlockLedger(num_blocks, self.block_tokens, caches_prefixes=False)
        timer = StepTimer(self.cost)
        hop_s = self.hop_s if num_stages > 1 else 0.0

        def stage_times(plan: StepPlan) -> list[float]:
            return [timer.time_s(plan) / num_stages + hop_s] * num_stages

        return VirtualStages(environment, Loop(LoopState(config, ledger, policy), policy), stage_times)


class VirtualCluster:
    """Engines by epoch, and the lifecycles of each request on all its engines.

    Attributes:
        engines: Engines that accept requests; while there is none, requests wait in the cluster.
        stories: Lifecycles of each request, by its id: one for each engine that had it, in order.
        num_coming: Requests that have not arrived yet.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.engines: dict[int, VirtualEngine] = {}
        self.stories: dict[str, list[Lifecycle]] = {}
        self.num_coming = 0
        self._epochs = count(1)
        self._held: list[Request] = []

    def join(self, engine: VirtualEngine) -> int:
        """Add an engine that accepts requests from now on; returns its epoch."""
        epoch = next(self._epochs)
        self.engines[epoch] = engine
        held, self._held = self._held, []
        for request in held:
            self.submit(request)
        return epoch

    def leave(self, epoch: int) -> VirtualEngine:
        """Remove an engine, which accepts no more requests; returns it."""
        return self.engines.pop(epoch)

    def submit(self, request: Request) -> None:
        """Submit a request to the engine with the highest freeness; it waits here while there is none."""
        num_tokens = len(request.prompt_token_ids) + len(request.known_token_ids)
        block_tokens = next(iter(self.engines.values())).loop.state.ledger.block_tokens if self.engines else 1
        epoch = choose_instance((see(one, engine) for one, engine in self.engines.items()), num_tokens // block_tokens)
        if epoch is None:
            self._held.append(request)
        else:
            engine = self.engines[epoch]
            self.note(request, engine.lifecycles, engine.submit(request))

    @property
    def is_idle(self) -> bool:
        """Whether all requests have arrived and ended."""
        return not (self.num_coming or self._held or any(one.loop.has_unfinished for one in self.engines.values()))

    def note(self, request: Request, lifecycles: Mapping[SeqId, Lifecycle], seq_id: SeqId) -> None:
        """Add the lifecycle of a request on an engine."""
        self.stories.setdefault(request.request_id, []).append(lifecycles[seq_id])

    def token_times_s(self, request_id: str) -> list[float]:
        """The time of each output token of a request, on all its engines."""
        return [time_s for life in self.stories[request_id] for time_s in life.token_times_s]


def see(epoch: int, engine: VirtualEngine) -> InstanceView:
    """The dispatcher's view of an engine."""
    state = engine.loop.state
    block_tokens = state.ledger.block_tokens
    demands = [-(-len(seq.tokens) // block_tokens) for seq in state.sequences.values()]
    return InstanceView(epoch, state.ledger.num_blocks, sum(demands), len(demands))


def serve_cluster(cluster: VirtualCluster, requests: Iterable[Request]) -> float:
    """Submit all requests at their arrival times and serve them; returns the time of the last token, in seconds."""

    def arrive(request: Request) -> None:
        cluster.num_coming -= 1
        cluster.submit(request)

    for request in requests:
        cluster.num_coming += 1
        cluster.environment.schedule(request.arrival_s, partial(arrive, request))
    cluster.environment.run()
    return max(life.token_times_s[-1] for lives in cluster.stories.values() for life in lives if life.token_times_s)
