"""A model whose equal instances can form a pipeline, and a cluster of these that serves requests in virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from floodplain.core.blocks import BlockLedger
from floodplain.core.plan import StepPlan
from floodplain.core.request import Request
from floodplain.cost.pipeline import ChunkPrice
from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.policy.drop import DropSizes
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.arrivals import Arrivals
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.environment import Environment
from floodplain.sim.regrouping import GroupModel
from floodplain.sim.stages import VirtualStages


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
        head_cost: As in ``sim.regrouping.GroupModel``; the stages of a group cost the same.
    """

    cost: StepCost
    sizes: DropSizes
    num_blocks: int
    block_tokens: int
    config: LoopConfig
    hop_s: float = 0.0
    least_tokens: int = 256
    head_cost: float = 0.0

    def groups_in(self, environment: Environment) -> GroupModel:
        """The same for ``Regrouping``: single instances, and pipelines of as many stages as members."""
        return GroupModel(
            self.sizes, self.num_blocks, self.block_tokens, self.head_cost,
            lambda: self.make_stages(environment, 1, self.num_blocks),
            lambda kept, num_blocks: self.make_stages(environment, len(kept), num_blocks),
        )  # fmt: skip

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


def serve_cluster(cluster: VirtualCluster, requests: Iterable[Request]) -> float:
    """Submit all requests at their arrival times and serve them; returns the time of the last token, in seconds."""

    def send(request: Request) -> bool:
        cluster.submit(request)
        return True

    cluster.arrivals = Arrivals(cluster.environment, send)
    cluster.arrivals.expect(sorted(requests, key=lambda request: request.arrival_s))
    cluster.environment.run()
    return max(life.token_times_s[-1] for lives in cluster.stories.values() for life in lives if life.token_times_s)
