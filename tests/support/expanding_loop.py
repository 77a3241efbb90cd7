"""The real loop in virtual time on a pool that layers expand: the ledger grows and shrinks between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from floodplain.core.blocks import BlockId, BlockLedger, BlockState
from floodplain.core.layer_places import every_place
from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request
from floodplain.core.shrink import commit_shrink, plan_shrink
from floodplain.cost.expansion import step_stall_s
from floodplain.policy.expansion import ExpansionPolicy, ExpansionView
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from floodplain.sim.environment import Environment
from floodplain.sim.executor import VirtualExecutor, VirtualLinks
from floodplain.sim.instance import VirtualInstance
from tests.support.bursts import BLOCK_BYTES, Machine

NUM_LAYERS = 32
PLACES = {places.num_streamed: places for places in every_place(NUM_LAYERS)}


@dataclass(kw_only=True)
class Streams:
    """A loop's layers: what steps take, and what is decided between them.

    Attributes:
        loop: Whose ledger it is.
        policy: Decides; None keeps ``num_streamed``.
        base_blocks: Blocks while nothing streams.
        weights_s: Of a step: weights.
        block_s: Of a step: each block that is read.
        token_s: Of a step: each token of a prompt.
        link_ratio: Bandwidth of the link over that of the memory; may change.
        num_streamed: Now.
    """

    loop: Loop
    policy: ExpansionPolicy | None
    base_blocks: int
    weights_s: float = 0.02
    block_s: float = 1e-5
    token_s: float = 2e-5
    link_ratio: float = 0.12
    num_streamed: int = 0
    step_s: float = 0.0
    stall_s: float = 0.0
    copy_s: float = 0.0
    told: list[tuple[float, float, int]] = field(default_factory=list)  # of each step: (step_s, stall_s, num_streamed)
    _num_preempted: int = 0

    @property
    def ledger(self) -> BlockLedger:
        return self.loop.state.ledger

    def step_time_s(self, plan: StepPlan) -> float:
        _, num_prompt = plan.count_work()
        num_read = sum(len(seq.blocks) for seq in self.loop.state.running)
        self.step_s = self.weights_s + self.block_s * num_read + self.token_s * num_prompt
        self.copy_s = self.block_s * num_read / self.link_ratio / NUM_LAYERS
        self.stall_s = step_stall_s(PLACES[self.num_streamed], self.step_s, self.copy_s)
        self.told.append((self.step_s, self.stall_s, self.num_streamed))
        return self.step_s + self.stall_s

    def at_boundary(self) -> None:
        if self.policy is not None:
            self.resize(self.policy.decide(self.look()).num_streamed)

    def look(self) -> ExpansionView:
        num_preempted = sum(self.loop.counters.preemptions.values())
        is_binding = num_preempted > self._num_preempted or bool(self.loop.state.waiting.head()[:1])
        self._num_preempted = num_preempted
        return ExpansionView(
            step_s=self.step_s,
            stall_s=self.stall_s,
            copy_s=self.copy_s,
            num_streamed=self.num_streamed,
            num_held_blocks=self.ledger.num_blocks - self.ledger.num_available,
            num_blocks=self.ledger.num_blocks,
            is_binding=is_binding,
        )

    def resize(self, num_streamed: int) -> None:
        """Grow at once; shrink as far as used blocks allow, and be done when that is far enough."""
        size = self.ledger.quantum_blocks
        target = int(self.base_blocks * PLACES[num_streamed].expansion) // size * size
        if target < self.ledger.num_blocks:
            moved = commit_shrink(self.ledger, plan_shrink(self.ledger, target))
            self.loop.remap_blocks(moved)
        elif target > self.ledger.num_blocks:
            self.ledger.add_memory(self._absent(target - self.ledger.num_blocks))
        if self.ledger.num_blocks <= target:
            self.num_streamed = num_streamed

    def _absent(self, num_blocks: int) -> list[int]:
        """The first blocks that have no memory."""
        ledger = self.ledger
        indexed = range(ledger.num_indexed_blocks)
        absent = [block for block in indexed if ledger.state(BlockId(block)) is BlockState.ABSENT]
        return [*absent, *range(len(indexed), len(indexed) + num_blocks)][:num_blocks]


class ExpandingInstance(VirtualInstance):
    """Its layers are looked at between two steps."""

    def __init__(self, environment: Environment, loop: Loop, executor: VirtualExecutor, streams: Streams) -> None:
        super().__init__(environment, loop, executor)
        self._streams = streams

    def _on_computed(self, result: StepResult) -> None:
        self._is_computing = False
        self._driver.complete(result, self._environment.now)
        self._streams.at_boundary()
        self._advance()


def run_loop(
    machine: Machine, requests: Iterable[Request], fixed: int | None = None, links: Mapping[float, float] | None = None
) -> tuple[Streams, VirtualInstance, Environment]:
    """Serve all requests under FCFS, which preempts by recomputing.

    Args:
        machine: Its pool is that without streams.
        requests: All of them.
        fixed: Layers that always stream; None asks ``ExpansionPolicy``.
        links: From when on the link has which ratio.
    """
    loop = machine.make_loop(FcfsPolicy())
    policy = ExpansionPolicy(tuple(PLACES.values()), machine.num_blocks) if fixed is None else None
    streams = Streams(loop=loop, policy=policy, base_blocks=machine.num_blocks)
    streams.resize(fixed or 0)
    environment = Environment()
    executor = VirtualExecutor(streams.step_time_s, VirtualLinks({}, BLOCK_BYTES))
    instance = ExpandingInstance(environment, loop, executor, streams)
    for request in requests:
        environment.schedule(request.arrival_s, lambda request=request: instance.submit(request))  # type: ignore[misc]
    for when_s, ratio in (links or {}).items():
        environment.schedule(when_s, lambda ratio=ratio: setattr(streams, "link_ratio", ratio))  # type: ignore[misc]
    environment.run()
    loop.check_integrity()
    return streams, instance, environment
