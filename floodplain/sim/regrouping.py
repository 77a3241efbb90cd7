"""Drop and restore in virtual time: instances become a group, and single instances again; each step is timed.

As in the engine (KunServe, sections 4.1, 4.2, 4.4): members pause at a boundary, pages are remapped, the group accepts
new requests at once, and running requests resume when their KV has been copied; copied KV is
unmapped then. Restore: parameters are pulled while the group runs, it pauses, pages are remapped, KV is copied back.
Simpler than the engine: layers are cut evenly, and the group keeps its blocks until it pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

from floodplain.core.free_blocks import BlockId
from floodplain.core.request import Request
from floodplain.policy.drop import GroupLoad, plan_drop, plan_largest
from floodplain.policy.drop_timing import ClusterLoad, DropMove, DropTiming
from floodplain.runtime.handover import HeldBlocks, Record, take_records
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.instance import DUMMY_TOKEN
from floodplain.sim.stages import VirtualModel, VirtualStages


@dataclass(frozen=True, slots=True)
class GroupLink:
    """The costs of a transition.

    Attributes:
        bandwidth: Bytes per second between members, each way.
        remap_s_per_byte: Seconds per byte of remapped pages.
    """

    bandwidth: float
    remap_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Transition:
    """One drop or restore, for a trace.

    Attributes:
        when_s: Time of the decision.
        is_drop: True for a drop, False for a restore.
        usable_s: Seconds until new requests could run again.
        whole_s: Seconds until the last request had its KV.
    """

    when_s: float
    is_drop: bool
    usable_s: float
    whole_s: float


class Regrouping:
    """Watches a cluster of single instances, and drops and restores layers as the policies decide.

    Args:
        cluster: The cluster, to which it adds the instances.
        model: The model of all instances.
        link: The link between instances.
        num_instances: Instances at first, each alone.
        timing: Decides when to drop and restore.
        restores: Whether groups are restored.
        period_s: Seconds between two calls of ``look``.

    Attributes:
        transitions: All transitions, in order.
        drop_loads: The load at each decision to drop.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        model: VirtualModel,
        link: GroupLink,
        num_instances: int,
        timing: DropTiming,
        *,
        restores: bool = True,
        period_s: float = 0.25,
    ) -> None:
        self.transitions: list[Transition] = []
        self.drop_loads: list[ClusterLoad] = []
        self._cluster, self._model, self._link, self._timing = cluster, model, link, timing
        self._restores, self._period_s = restores, period_s
        self._stages: dict[int, int] = {}
        self._num_instances = num_instances
        self._num_changing = 0
        for _ in range(num_instances):
            self._join(model.make_stages(cluster.environment, 1, model.num_blocks), 1)

    def look(self) -> None:
        """Measure the load and decide; repeats every ``period_s`` until all requests and transitions have ended."""
        environment = self._cluster.environment
        load = self._see()
        moment = self._timing.decide(load, self._transition_s(load.num_used_blocks))
        if moment.move is DropMove.DROP:
            self.drop_loads.append(load)
            loads, sizes = self._loads(), self._model.sizes
            plan = plan_drop(loads, moment.need_blocks, sizes) or plan_largest(loads, sizes)
            for group in plan.groups if plan is not None else ():
                self._gather(group, environment.now)
        elif moment.move is DropMove.RESTORE and self._restores:
            for epoch in [epoch for epoch, num_stages in self._stages.items() if num_stages > 1]:
                self._num_changing += 1
                pull_s = self._dropped_bytes(self._stages[epoch]) / self._link.bandwidth
                environment.schedule(environment.now + pull_s, partial(self._scatter, epoch, environment.now))
        if self._num_changing or not self._cluster.is_idle:
            environment.schedule(environment.now + self._period_s, self.look)

    # -- load ------------------------------------------------------------------------------------------------------

    def _see(self) -> ClusterLoad:
        states = [engine.loop.state for engine in self._cluster.engines.values()]
        block_tokens, num_blocks = self._model.block_tokens, sum(state.ledger.num_blocks for state in states)
        used = num_blocks - sum(state.ledger.num_available for state in states)
        waiting = [seq for state in states for seq in state.sequences.values() if not seq.blocks]
        return ClusterLoad(
            now=self._cluster.environment.now,
            num_used_blocks=used,
            num_head_blocks=sum(-(-len(seq.tokens) // block_tokens) for seq in waiting),
            num_blocks=num_blocks,
            undropped_blocks=self._num_instances * self._model.num_blocks,
            is_grouped=any(num_stages > 1 for num_stages in self._stages.values()),
            is_changing=self._num_changing > 0,
        )

    def _loads(self) -> list[GroupLoad]:
        loads = []
        for epoch, num_stages in self._stages.items():
            state = self._cluster.engines[epoch].loop.state
            demands = (-(-len(seq.tokens) // self._model.block_tokens) for seq in state.sequences.values())
            loads.append(GroupLoad((epoch,) * num_stages, (self._model.num_blocks,) * num_stages, sum(demands)))
        return loads

    def _transition_s(self, num_used_blocks: int) -> float:
        """The estimated seconds of a drop in pairs."""
        kv_bytes = num_used_blocks / self._num_instances * self._model.block_tokens * self._model.token_bytes
        return self._dropped_bytes(2) * self._link.remap_s_per_byte + kv_bytes / 2 / self._link.bandwidth

    def _dropped_bytes(self, num_stages: int) -> float:
        sizes = self._model.sizes
        return (sizes.num_layers - sizes.num_layers / num_stages) * sizes.layer_bytes

    # -- drop ------------------------------------------------------------------------------------------------------

    def _join(self, engine: VirtualStages, num_stages: int) -> None:
        self._stages[self._cluster.join(engine)] = num_stages

    def _gather(self, epochs: Sequence[int], decided_s: float) -> None:
        """Pause the members; when all are paused, start the group."""
        self._num_changing += 1
        num_stages = sum(self._stages.pop(epoch) for epoch in set(epochs))
        parts = [self._cluster.leave(epoch) for epoch in dict.fromkeys(epochs)]
        members = [part for part in parts if isinstance(part, VirtualStages)]
        running = set(range(len(members)))

        def on_paused(index: int) -> None:
            running.discard(index)
            if not running:
                self._remap(num_stages, partial(self._begin_group, members, num_stages, decided_s))

        for index, member in enumerate(members):
            member.pause(partial(on_paused, index))

    def _remap(self, num_stages: int, then: Callable[[], object]) -> None:
        remap_s = self._dropped_bytes(num_stages) * self._link.remap_s_per_byte
        self._cluster.environment.schedule(self._cluster.environment.now + remap_s, then)

    def _begin_group(self, members: Sequence[VirtualStages], num_stages: int, decided_s: float) -> None:
        records = [(home, record) for home, one in enumerate(members) for record in take_records(one.loop)]
        first_blocks = self._fit(records, len(members), num_stages)
        group = self._model.make_stages(self._cluster.environment, num_stages, first_blocks)
        whole_s = self._hand_over(group, records, num_stages, decided_s, is_drop=True)
        self._join(group, num_stages)
        self._cluster.environment.schedule(whole_s, partial(self._grow, group, num_stages))

    def _fit(self, records: list[tuple[int, Record]], num_members: int, num_stages: int) -> int:
        """Blocks of a group while KV to be sent is still mapped. The youngest requests lose their KV until all fit."""
        sizes, pool = self._model.sizes, self._model.num_blocks
        kept = -(-sizes.num_layers // num_stages)
        youngest_first = sorted(range(len(records)), key=lambda index: -records[index][1].request.arrival_s)
        while True:
            used = [0] * num_members
            for home, record in records:
                used[home] += len(record.sources)
            held = max(used) * kept + (pool - max(used)) * sizes.num_layers
            num_bytes = held * sizes.block_bytes + (sizes.num_layers - kept) * sizes.layer_bytes
            num_blocks = num_bytes // (kept * sizes.block_bytes)
            if sum(used) <= num_blocks:
                return num_blocks
            index = next(index for index in youngest_first if records[index][1].sources)
            home, record = records[index]
            records[index] = (home, replace(record, num_computed=0, sources=()))

    def _grow(self, group: VirtualStages, num_stages: int) -> None:
        ledger = group.loop.state.ledger
        num_blocks = self._model.sizes.group_blocks([self._model.num_blocks] * num_stages)
        ledger.add_memory(range(ledger.num_blocks, num_blocks))
        group.advance()

    # -- restore ---------------------------------------------------------------------------------------------------

    def _scatter(self, epoch: int, decided_s: float) -> None:
        num_stages = self._stages.pop(epoch)
        group = self._cluster.leave(epoch)
        assert isinstance(group, VirtualStages)
        group.pause(lambda: self._remap(num_stages, partial(self._end_group, group, num_stages, decided_s)))

    def _end_group(self, group: VirtualStages, num_stages: int, decided_s: float) -> None:
        """Each request goes to the member with the most room; requests without room are recomputed."""
        model, room = self._model, [self._model.num_blocks] * num_stages
        rows: list[list[tuple[int, Record]]] = [[] for _ in range(num_stages)]
        for record in take_records(group.loop):
            home = max(range(num_stages), key=lambda one: (room[one], -one))
            num_blocks = -(-(record.num_tokens + 1) // model.block_tokens)
            is_fitting = bool(record.sources) and num_blocks <= room[home]
            room[home] -= num_blocks
            rows[home].append((home, record if is_fitting else replace(record, num_computed=0, sources=())))
        for home in range(num_stages):
            engine = model.make_stages(self._cluster.environment, 1, model.num_blocks)
            self._num_changing += home > 0
            self._hand_over(engine, rows[home], num_stages, decided_s, is_drop=False)
            self._join(engine, 1)

    # -- both ------------------------------------------------------------------------------------------------------

    def _hand_over(
        self,
        engine: VirtualStages,
        records: Sequence[tuple[int, Record]],
        num_stages: int,
        decided_s: float,
        *,
        is_drop: bool,
    ) -> float:
        """Start requests without KV at once; each other request when its member's link has copied its KV.

        Args:
            engine: The engine that gets them; it has not started.
            records: (number of the member whose link the KV uses, record) of each request.
            num_stages: Stages of the group that begins or ends.
            decided_s: Time of the decision.
            is_drop: Whether the group begins.

        Returns:
            The time when the last one has its KV.
        """
        now, ledger = self._cluster.environment.now, engine.loop.state.ledger
        moving = [(home, record) for home, record in records if record.sources]
        ids = map(BlockId, count())  # new ids: pages move, bytes do not
        held = HeldBlocks(ledger, {row: list(islice(ids, len(one.sources))) for row, (_, one) in enumerate(moving)})
        _note_held(engine, held)
        whole_s = [now] * num_stages
        for row, (home, record) in enumerate(moving):
            num_bytes = record.num_computed * self._model.token_bytes * (num_stages - 1) / num_stages
            whole_s[home] += num_bytes / self._link.bandwidth
            self._cluster.environment.schedule(whole_s[home], partial(self._adopt, engine, held, row, record))
        self._cluster.environment.schedule(max(whole_s), self._end_change)
        self.transitions.append(Transition(decided_s, is_drop, now - decided_s, max(whole_s) - decided_s))
        for _, record in records:
            if not record.sources:
                request = _go_on(record)
                self._cluster.note(request, engine.lifecycles, engine.submit(request))
        return max(whole_s)

    def _adopt(self, engine: VirtualStages, held: HeldBlocks, row: int, record: Record) -> None:
        request = _go_on(record)
        blocks = held.take(row)
        _note_held(engine, held)
        seq_id = engine.adopt(request, blocks, record.num_computed)
        self._cluster.note(request, engine.lifecycles, seq_id)

    def _end_change(self) -> None:
        self._num_changing -= 1


def _note_held(engine: VirtualStages, held: HeldBlocks) -> None:
    """Tell the loop how many blocks are held: requests may wait for them while nothing else runs."""
    engine.loop.state.num_returning_blocks = held.num_blocks


def _go_on(record: Record) -> Request:
    """The request for its next engine: tokens generated so far are known tokens."""
    num_known = record.num_tokens - len(record.request.prompt_token_ids)
    return replace(record.request, known_token_ids=(DUMMY_TOKEN,) * num_known, is_accepted=True)
