"""The instances of a scenario in virtual time, with faults, and with memory that a neighbour lends and recalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import RequestRefused
from floodplain.core.layer_places import every_place
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import Relocation, StepPlan
from floodplain.core.request import Request, SeqId
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.cost.link import LINKS
from floodplain.cost.step_time import StepTimer
from floodplain.observe.timeline import Timeline, TimelineSample
from floodplain.policy.expansion import ExpansionPolicy
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState
from floodplain.sim.arrivals import Arrivals
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.environment import Environment
from floodplain.sim.expanding import ExpandingPool, StreamingCosts
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks
from floodplain.sim.machine import Machine, loop_config
from floodplain.sim.regrouping import Regrouping
from floodplain.sim.relief import StageTimes, relief_model, start_relief
from floodplain.sim.scenario import LenderPart, ReliefPart, Scenario
from floodplain.sim.stages import VirtualStages
from floodplain.sim.virtual_engine import VirtualEngine

SAMPLE_S = 1.0
"""Seconds between two samples of the timeline."""
RETRY_S = 0.01
"""Seconds between two looks at slots that copies still use."""
RELOCATED_BLOCKS = 64
"""The most blocks of one copy between tiers, as in the engine (``lending.peer_tier``)."""


class Fleet:
    """All instances behind a dispatcher. A request of an instance that dies is computed again on another one.

    Args:
        on_answer: Called with each request that has ended, its lifecycles (one for each instance that had it), and why
            it was refused (None: it was not).
        environment: Of other fleets, too; None: its own.
        on_start: Called with the number and the engine of an instance that starts; returns what to call at its death.

    Attributes:
        recalls_s: Seconds from each recall of lent memory until it was free.
        groups: Has instances drop and restore layers; None without relief.
        engines: All engines, dead ones included; of relief the groups, too.
        pools: The pools whose layers stream.
    """

    def __init__(
        self,
        scenario: Scenario,
        machine: Machine,
        on_answer: Callable[[Request, Sequence[Lifecycle], str | None], object],
        environment: Environment | None = None,
        on_start: Callable[[int, VirtualInstance], Callable[[], None]] | None = None,
    ) -> None:
        self.environment, self.timeline = environment or Environment(), Timeline()
        self._on_answer, self._on_start = on_answer, on_start
        self.recalls_s: list[float] = []
        self._scenario, self._machine = scenario, machine
        self._cluster = VirtualCluster(self.environment)
        self._arrivals = self._cluster.arrivals = Arrivals(self.environment, self._submit, scenario.max_concurrency)
        self.engines: list[VirtualEngine] = []
        self.pools: list[ExpandingPool] = []
        self._events, self.next_sample_s = blake2b(digest_size=16), 0.0
        self.groups = self._regroup(scenario.relief) if scenario.relief else None
        self._slots = [] if self.groups else [self._start(slot) for slot in range(scenario.num_instances)]
        for fault in scenario.faults:
            if fault.server is None:
                self.fail(fault.instance, fault.at, fault.down)
            elif not scenario.lenders:  # else the neighbourhood has all engines of the server fail
                for name in scenario.servers[fault.server]:
                    self.fail(int(name.rpartition("-")[2]), fault.at, fault.down)

    def serve(self, requests: Iterable[Request]) -> None:
        """Submit all requests at their arrival times, in order of which they are, and serve them to their ends."""
        self.expect(requests)
        self.environment.run()

    def expect(self, requests: Iterable[Request]) -> None:
        """Submit all requests at their arrival times, in order of which they are."""
        self._arrivals.expect(requests)

    @property
    def is_idle(self) -> bool:
        """Whether all requests have arrived and ended."""
        return self._cluster.is_idle

    @property
    def num_steps(self) -> float:
        """Steps so far, of all instances."""
        return self.count(lambda engine: engine.loop.counters.num_steps)

    @property
    def expects_change(self) -> bool:
        """Whether requests are to arrive, or an instance is to start."""
        return self._arrivals.num_loads > 0 or len(self._cluster.engines) < self._scenario.num_instances

    def fail(self, slot: int, at_s: float, down_s: float) -> None:
        """Have an instance die at a time, and an empty one take its place ``down_s`` seconds later."""
        self.environment.schedule(at_s, partial(self._stop, slot))
        self.environment.schedule(at_s + down_s, partial(self._restart, slot))

    @property
    def events(self) -> str:
        """A digest of all steps: equal for equal scenarios."""
        return self._events.hexdigest()

    def count(self, read: Callable[[VirtualEngine], float]) -> float:
        """The sum of a number over all ``engines``."""
        return sum(map(read, self.engines))

    def _regroup(self, part: ReliefPart) -> Regrouping:
        model = relief_model(self._scenario, self._machine, part, self._add_instance, self._add_group)
        return start_relief(self._cluster, model, self._scenario.num_instances, part)

    def _add_group(self, loop: Loop, times: StageTimes) -> VirtualStages:
        group, number = VirtualStages(self.environment, loop, times), len(self.engines)
        group.on_step = lambda plan, now: self._note(number, plan, plan.decodes, now)
        self._add(group)
        return group

    def _add_instance(self) -> VirtualInstance:
        scenario, machine, number = self._scenario, self._machine, len(self.engines)
        loop, timer = _make_loop(scenario, machine, number), StepTimer(machine.cost)
        pool = _expand(scenario, machine, loop, timer.time_s) if scenario.expansion else None
        instance = VirtualInstance(
            self.environment,
            loop,
            pool.step_time_s if pool else timer.time_s,
            VirtualLinks({link.tier: link for link in machine.links}, machine.block_bytes, machine.bandwidths),
            is_async=scenario.engine.scheduling == "async",
            timer=None if pool else timer,
            until_s=lambda: self.next_sample_s,
        )
        if pool:
            self.pools.append(pool)
            instance.on_boundary = pool.at_boundary
        decodes: tuple[SeqId, ...] | None = None

        def note(plan: StepPlan, now: float) -> None:
            nonlocal decodes
            self._note(number, plan, None if plan.decodes is decodes else plan.decodes, now)
            decodes = plan.decodes

        instance.on_step = note
        if scenario.lender is not None:
            Lender(self, instance, scenario.lender, machine.num_lent_blocks)
        self._add(instance)
        return instance

    def _add(self, engine: VirtualEngine) -> None:
        engine.on_ended = self._note_ended
        self.engines.append(engine)

    def _submit(self, request: Request) -> bool:
        try:
            self.engines[0].loop.check(request)
        except RequestRefused as error:
            self._on_answer(request, (), str(error))
            return False
        if self.groups is not None:
            self.groups.note_arrival(request)
        self._cluster.submit(request)
        return True

    def _note_ended(self, ended: Sequence[Request]) -> None:
        self._arrivals.note_ended(len(ended))
        for request in ended:
            self._on_answer(request, self._cluster.stories.pop(request.request_id), None)

    def _start(self, slot: int) -> _Life:
        instance = self._add_instance()
        on_death = self._on_start(slot, instance) if self._on_start is not None else _nothing
        return _Life(self._cluster.join(instance), instance, on_death)

    def _stop(self, slot: int) -> None:
        life = self._slots[slot]
        self._cluster.leave(life.epoch)
        life.on_death()
        for request in life.instance.stop():
            self._cluster.submit(request)

    def _restart(self, slot: int) -> None:
        self._slots[slot] = self._start(slot)

    def _note(self, number: int, plan: StepPlan, decodes: object, now: float) -> None:
        """Add a step of an instance to the digest; ``decodes`` is None if they are those of its step before."""
        chunks = [(chunk.seq_id, chunk.start, len(chunk.token_ids)) for chunk in plan.prefills]
        moves = [(transfer.kind.value, len(transfer.blocks)) for transfer in plan.transfers]
        self._events.update(repr((number, now, decodes, chunks, moves)).encode())
        if now >= self.next_sample_s:
            self.next_sample_s = now + SAMPLE_S
            self.timeline.record(self._sample(now))

    def _sample(self, now: float) -> TimelineSample:
        total: Counter[str] = Counter()
        if self.groups is not None:
            total["swapped"] = self.groups.num_moving
        for engine in self._cluster.engines.values():
            state = engine.loop.state
            total["running"] += len(state.running)
            total["waiting"] += len(state.waiting)
            total["swapped"] += len(state.swapped) + len(state.loading)
            total["used"] += state.ledger.num_blocks - state.ledger.num_available
            total["blocks"] += state.ledger.num_blocks
        return TimelineSample(now, total["running"], total["waiting"], total["swapped"], total["used"], total["blocks"])


@dataclass(frozen=True, slots=True)
class _Life:
    epoch: int
    instance: VirtualInstance
    on_death: Callable[[], None]


def _nothing() -> None:
    pass


def _make_loop(scenario: Scenario, machine: Machine, number: int) -> Loop:
    engine = scenario.engine
    policy = make_policy(engine.policy, engine.settings)
    ledger = BlockLedger(machine.num_blocks, engine.block_tokens, caches_prefixes=engine.prefix_cache)
    slots = [SlotLedger(tier, num_slots) for tier, num_slots in machine.slots.items()]
    backups = BackupTable(slots, retains=engine.prefix_cache)
    state = LoopState(loop_config(scenario, machine), ledger, policy, backups, machine.links)
    return Loop(state, policy, scenario.workload.seed + number)


def _expand(scenario: Scenario, machine: Machine, loop: Loop, time_s: Callable[[StepPlan], float]) -> ExpandingPool:
    part, every = scenario.expansion, tuple(every_place(scenario.shape.num_layers))
    assert part is not None
    bandwidth = LINKS[part.link].inbound.peak_bandwidth if isinstance(part.link, str) else part.link
    fixed_s, block_s = machine.cost.batch_s([1], [], 1), machine.block_bytes / bandwidth
    costs = StreamingCosts(lambda plan, _: time_s(plan), fixed_s, block_s)
    if part.factor == "auto":
        return ExpandingPool(loop, every, costs, ExpansionPolicy(every, machine.num_blocks))
    nearest = min(every, key=lambda one: abs(one.expansion - float(part.factor)))
    return ExpandingPool(loop, (nearest,), costs)


class Lender:
    """A neighbour that lends memory to one engine, and recalls it while it is busy itself.

    At a recall the KV there goes to host memory, over the slower of both links; what finds no slot there is computed
    again. Afterwards KV of preempted requests comes back.
    """

    def __init__(self, fleet: Fleet, instance: VirtualInstance, part: LenderPart, num_slots: int) -> None:
        self._fleet, self._instance, self._slots = fleet, instance, range(num_slots)
        self._recalled_s: float | None = None
        now = fleet.environment.now
        if not any(start <= now < end for start, end in part.busy):
            self._at(now, self._lend)
        for start, end in part.busy:
            if end > now:
                self._at(max(now, start), self._recall)
                self._at(end, self._lend)

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        self._fleet.environment.schedule(when_s, lambda: self._instance.at_boundary(event))

    def _lend(self) -> None:
        if self._recalled_s is not None:  # the neighbour has calmed down before it had its memory back
            self._at(self._fleet.environment.now + RETRY_S, self._lend)
            return
        self._instance.loop.relocations.backups.add_slots(Tier.PEER, self._slots)
        self._promote()

    def _recall(self) -> None:
        self._recalled_s = self._fleet.environment.now
        self._instance.loop.relocations.backups.retire_slots(Tier.PEER, self._slots)
        self._evacuate()

    def _evacuate(self) -> None:
        relocations = self._instance.loop.relocations
        moving = relocations.evacuate(Tier.PEER, self._slots, Tier.HOST, RELOCATED_BLOCKS)
        if moving is not None:
            self._copy(moving, self._evacuate)
        elif relocations.backups.slots[Tier.PEER].count_taken(self._slots):  # copies read there, and end soon
            self._at(self._fleet.environment.now + RETRY_S, self._evacuate)
        elif self._recalled_s is not None:
            self._fleet.recalls_s.append(self._fleet.environment.now - self._recalled_s)
            self._recalled_s = None

    def _promote(self) -> None:
        if self._recalled_s is None:
            moving = self._instance.loop.relocations.bring_nearer(Tier.HOST, Tier.PEER, RELOCATED_BLOCKS)
            if moving is not None:
                self._copy(moving, self._promote)

    def _copy(self, moving: Relocation, then: Callable[[], None]) -> None:
        end_s = self._instance.links.relocate(moving, self._fleet.environment.now)

        def settle() -> None:
            self._instance.loop.relocations.settle(moving.relocation_id, ())
            then()

        self._at(end_s, settle)
