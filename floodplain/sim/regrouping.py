"""Drop and restore in virtual time: instances become a group, and single instances again; each step is timed.

As in the engine (KunServe, sections 4.1, 4.2, 4.4; docs/design/018), but a group keeps its blocks until it pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

from floodplain.core.errors import UserError
from floodplain.core.free_blocks import BlockId
from floodplain.core.group_sizes import Merge
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.request import Request
from floodplain.policy.drop import ClusterLoad, DropMove, DropSizes, GroupLoad, plan_drop, plan_largest
from floodplain.policy.relief import DropCost, Progress, ReliefLoad, ReliefRule, exchanged_bytes
from floodplain.runtime.handover import HeldBlocks, Record, take_records
from floodplain.sim.cluster import VirtualCluster
from floodplain.sim.group_plan import Moving, merge_of, plan_handover, without_kv
from floodplain.sim.virtual_engine import DUMMY_TOKEN, VirtualEngine


@dataclass(frozen=True, slots=True)
class GroupModel:
    """A model on equal instances.

    Attributes:
        num_blocks: Pool of an instance that has all layers.
        head_cost: Work of a pipeline's last stage beside its layers, in layers.
        make_group: Makes a pipeline of members that keep these layers, with a pool of so many blocks.
    """

    sizes: DropSizes
    num_blocks: int
    block_tokens: int
    head_cost: float
    make_single: Callable[[], VirtualEngine]
    make_group: Callable[[Sequence[range], int], VirtualEngine]


@dataclass(frozen=True, slots=True)
class GroupLink:
    """The costs of a transition.

    ``bandwidth``: bytes per second between members, each way. ``remap_s_per_byte``: seconds per byte of remapped pages.
    """

    bandwidth: float
    remap_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One drop, or the return of one instance to all layers; what is not known at the decision is 0 until the end.

    Attributes:
        usable_s: Seconds until new requests could run again.
        whole_s: Seconds until the last request had its KV.
        instances: Members of the new group, the leader first; the restored instance.
        num_blocks: Blocks of the new pool, and
        num_blocks_before: of the pools that it replaces (a restore: of the group's).
        kv_bytes: KV that crossed links; ``parameter_bytes`` likewise.
    """

    when_s: float
    is_drop: bool
    usable_s: float = 0.0
    whole_s: float = 0.0
    instances: tuple[int, ...]
    num_blocks: int = 0
    num_blocks_before: int
    kv_bytes: float = 0
    parameter_bytes: float = 0.0
    num_recomputed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A group, or a single instance: its members, the leader first, the layers that each has, and its engine."""

    members: tuple[int, ...]
    kept: tuple[range, ...]
    engine: VirtualEngine

    @property
    def is_single(self) -> bool:
        return len(self.members) == 1

    @property
    def num_blocks(self) -> int:
        return self.engine.loop.state.ledger.num_blocks


class Regrouping:
    """Watches a cluster of single instances, and drops and restores layers as the policies decide.

    ``num_instances``: instances at first, each alone. ``period_s``: seconds between two calls of ``look``.

    ``drop_loads``: the load at each decision to drop. ``num_moving``: requests that have left an engine, and whose KV
    has not reached the next one.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        model: GroupModel,
        link: GroupLink,
        num_instances: int,
        rule: ReliefRule,
        *,
        restores: bool = True,
        period_s: float = 0.25,
    ) -> None:
        self.transitions: list[Transition] = []
        self.drop_loads: list[ClusterLoad] = []
        self.num_moving = 0
        self._cluster, self._model, self._link, self.rule = cluster, model, link, rule
        self._restores, self._period_s = restores, period_s
        self._groups: dict[int, _Group] = {}
        self._live: dict[str, list[Lifecycle]] = {}
        self._num_instances = num_instances
        self._num_changing = 0
        for number in range(num_instances):
            self._join_single(number, model.make_single())

    @property
    def engines(self) -> list[VirtualEngine]:
        """The engines that accept requests now."""
        return [group.engine for group in self._groups.values()]

    def note_arrival(self, request: Request) -> None:
        """Count a request that arrives now; only prices need it."""
        if self.rule.is_priced:
            self.rule.arrivals.note_arrival(self._cluster.environment.now)
            self._live[request.request_id] = self._cluster.story_of(request.request_id)

    def look(self) -> None:
        """Measure the load and decide; repeats every ``period_s`` until all requests and transitions have ended."""
        environment = self._cluster.environment
        self._learn()
        load = self._find_load()
        moment = self.rule.decide(load)
        if moment.move is DropMove.DROP:
            self.drop_loads.append(load.blocks)
            self._drop(moment.need_blocks)
        elif moment.move is DropMove.RESTORE and self._restores:
            for epoch in [epoch for epoch, group in self._groups.items() if not group.is_single]:
                self._num_changing += 1
                pull_s = self._dropped_bytes(self._groups[epoch].kept) / self._link.bandwidth
                environment.schedule(environment.now + pull_s, partial(self._scatter, epoch, environment.now))
        if self._num_changing or not self._cluster.is_idle:
            environment.schedule(environment.now + self._period_s, self.look)

    # -- load ------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        for group in self._groups.values():
            state = group.engine.loop.state
            counters = state.counters
            progress = Progress(
                self._cluster.environment.now, counters.num_steps, counters.num_generated_tokens, len(state.running)
            )
            if group.is_single:
                self.rule.steps.note(group.members[0], progress)
            else:
                for member in group.members:
                    self.rule.steps.forget(member)
        for request_id, lives in list(self._live.items()):
            if lives and lives[-1].events[-1][1] is EventKind.FINISHED:
                del self._live[request_id]
                self.rule.arrivals.note_end(sum(len(life.token_times_s) for life in lives))

    def _find_load(self) -> ReliefLoad:
        states = [group.engine.loop.state for group in self._groups.values()]
        block_tokens, num_blocks = self._model.block_tokens, sum(state.ledger.num_blocks for state in states)
        used = num_blocks - sum(state.ledger.num_available for state in states)
        waiting = [seq for state in states for seq in state.sequences.values() if not seq.blocks]
        blocks = ClusterLoad(
            now=self._cluster.environment.now,
            num_used_blocks=used,
            num_head_blocks=sum(-(-len(seq.tokens) // block_tokens) for seq in waiting),
            num_blocks=num_blocks,
            undropped_blocks=self._num_instances * self._model.num_blocks,
            is_grouped=any(not group.is_single for group in self._groups.values()),
            is_changing=self._num_changing > 0,
        )
        num_running = sum(len(state.running) for state in states)
        own_blocks, drop_cost = (self._model.num_blocks,) * len(states), partial(self._find_cost, used)
        return ReliefLoad(blocks, own_blocks, num_running, len(waiting), self._model.sizes, drop_cost)

    def _find_loads(self) -> list[GroupLoad]:
        loads = []
        for group in self._groups.values():
            sequences = group.engine.loop.state.sequences.values()
            demand = sum(-(-len(seq.tokens) // self._model.block_tokens) for seq in sequences)
            loads.append(GroupLoad(group.members, (self._model.num_blocks,) * len(group.members), demand))
        return loads

    def _find_cost(self, num_used_blocks: int, num_stages: int) -> DropCost:
        kv_bytes = num_used_blocks / self._num_instances * self._model.block_tokens * self._token_bytes
        num_layers, layer_bytes = self._model.sizes.num_layers, self._model.sizes.layer_bytes
        remap_s = (num_layers - num_layers / num_stages) * layer_bytes * self._link.remap_s_per_byte
        return DropCost(remap_s, exchanged_bytes(kv_bytes, num_stages), self._link.bandwidth)

    @property
    def _token_bytes(self) -> float:
        sizes = self._model.sizes
        return sizes.num_layers * sizes.block_bytes / self._model.block_tokens

    def _dropped_bytes(self, kept: Sequence[range]) -> int:
        """Parameters that the member with the fewest layers lacks."""
        return (self._model.sizes.num_layers - min(map(len, kept))) * self._model.sizes.layer_bytes

    # -- drop ------------------------------------------------------------------------------------------------------

    def _drop(self, need_blocks: int) -> None:
        loads, sizes, most_stages = self._find_loads(), self._model.sizes, self.rule.most_stages
        plan = plan_drop(loads, need_blocks, sizes, most_stages) or plan_largest(loads, sizes, most_stages)
        for instances in plan.groups if plan is not None else ():
            self.gather(instances)

    def gather(self, instances: Sequence[int]) -> None:
        """Make a group once its members have paused. Does nothing if they cannot share the layers."""
        parts = {epoch: group for epoch, group in self._groups.items() if group.members[0] in instances}
        old = {group.members: group.kept for group in parts.values() if not group.is_single}
        try:
            order, merge = merge_of(instances, old, self._model.sizes, self._model.num_blocks, self._model.head_cost)
        except UserError:
            return
        self._num_changing += 1
        num_blocks = sum(group.num_blocks for group in parts.values())
        now = self._cluster.environment.now
        change = Transition(when_s=now, is_drop=True, instances=order, num_blocks_before=num_blocks)
        members = sorted((self._leave(epoch) for epoch in parts), key=lambda group: order.index(group.members[0]))
        running = set(members)

        def on_paused(member: _Group) -> None:
            running.discard(member)
            if not running:
                self._remap(merge.kept, partial(self._begin_group, members, merge, change))

        for member in members:
            member.engine.pause(partial(on_paused, member))

    def _join_single(self, number: int, engine: VirtualEngine) -> None:
        self._join(_Group((number,), (range(self._model.sizes.num_layers),), engine))

    def _join(self, group: _Group) -> None:
        self._groups[self._cluster.join(group.engine)] = group

    def _leave(self, epoch: int) -> _Group:
        self._cluster.leave(epoch)
        return self._groups.pop(epoch)

    def _remap(self, kept: Sequence[range], then: Callable[[], object]) -> None:
        remap_s = self._dropped_bytes(kept) * self._link.remap_s_per_byte
        self._cluster.environment.schedule(self._cluster.environment.now + remap_s, then)

    def _begin_group(self, members: Sequence[_Group], merge: Merge, change: Transition) -> None:
        model, places = self._model, {instance: place for place, instance in enumerate(change.instances)}
        records = [(places[one.members[0]], record) for one in members for record in self._take(one.engine)]
        sizes, moves = plan_handover(merge, model.sizes, model.num_blocks, records, self._token_bytes)
        engine = model.make_group(merge.kept, sizes.num_quanta)
        whole_s = self._hand_over(engine, moves, change, sizes.num_settled_quanta)
        self._join(_Group(change.instances, merge.kept, engine))
        self._cluster.environment.schedule(whole_s, partial(self._grow, engine, sizes.num_settled_quanta))

    def _grow(self, engine: VirtualEngine, num_blocks: int) -> None:
        ledger = engine.loop.state.ledger
        ledger.add_memory(range(ledger.num_blocks, num_blocks))
        engine.advance()

    def _take(self, engine: VirtualEngine) -> list[Record]:
        for seq in engine.loop.state.running:
            seq.lifecycle.record(EventKind.PREEMPTED, self._cluster.environment.now)
        records = take_records(engine.loop)
        engine.forget()
        self.num_moving += len(records)
        return records

    # -- restore ---------------------------------------------------------------------------------------------------

    def _scatter(self, epoch: int, decided_s: float) -> None:
        group = self._leave(epoch)
        group.engine.pause(lambda: self._remap(group.kept, partial(self._end_group, group, decided_s)))

    def _end_group(self, group: _Group, decided_s: float) -> None:
        """Each request goes to the member with the most room; requests without room are recomputed."""
        num_layers, room = self._model.sizes.num_layers, [self._model.num_blocks] * len(group.members)
        rows: list[list[Moving]] = [[] for _ in room]
        for record in self._take(group.engine):
            home = max(range(len(room)), key=lambda one: (room[one], -one))
            num_blocks = -(-(record.num_tokens + 1) // self._model.block_tokens)
            is_fitting = bool(record.sources) and num_blocks <= room[home]
            room[home] -= num_blocks
            num_absent = num_layers - len(group.kept[home])
            kv_bytes = record.num_computed * self._token_bytes * num_absent / num_layers
            rows[home].append(Moving(record, (), {0: kv_bytes}) if is_fitting else Moving(without_kv(record)))
        for home, number in enumerate(group.members):
            engine = self._model.make_single()
            self._num_changing += home > 0
            ids = count()  # new ids: pages move, bytes do not
            moves = [replace(one, blocks=tuple(islice(ids, len(one.record.sources)))) for one in rows[home]]
            change = Transition(
                when_s=decided_s,
                is_drop=False,
                instances=(number,),
                num_blocks_before=group.num_blocks,
                parameter_bytes=(num_layers - len(group.kept[home])) * self._model.sizes.layer_bytes,
            )
            self._hand_over(engine, moves, change, self._model.num_blocks)
            self._join_single(number, engine)

    # -- both ------------------------------------------------------------------------------------------------------

    def _hand_over(self, engine: VirtualEngine, moves: Sequence[Moving], change: Transition, num_blocks: int) -> float:
        """Start requests without KV at once, each other when links have carried its KV, in the order of ``moves``.

        ``num_blocks``: of the engine's pool, once all KV is there. Returns the time when that is so.
        """
        now, ledger = self._cluster.environment.now, engine.loop.state.ledger
        with_kv = [one for one in moves if one.blocks]
        held = HeldBlocks(ledger, {row: list(map(BlockId, one.blocks)) for row, one in enumerate(with_kv)})
        _note_held(engine, held)
        free_s: dict[int, float] = {}
        last_s = now
        for row, one in enumerate(with_kv):
            whole_s = now
            for place, num_bytes in one.link_bytes.items():
                free_s[place] = free_s.get(place, now) + num_bytes / self._link.bandwidth
                whole_s = max(whole_s, free_s[place])
            last_s = max(last_s, whole_s)
            self._cluster.environment.schedule(whole_s, partial(self._adopt, engine, held, row, one.record))
        self._cluster.environment.schedule(last_s, self._end_change)
        fresh = [one.record for one in moves if not one.blocks]
        self.transitions.append(
            replace(
                change,
                usable_s=now - change.when_s,
                whole_s=last_s - change.when_s,
                num_blocks=num_blocks,
                kv_bytes=sum(sum(one.link_bytes.values()) for one in with_kv),
                num_recomputed=sum(_count_known(record) > 0 for record in fresh),
            )
        )
        for record in fresh:
            self.num_moving -= 1
            request = _go_on(record)
            self._cluster.note(request, engine.lifecycles, engine.submit(request))
        return last_s

    def _adopt(self, engine: VirtualEngine, held: HeldBlocks, row: int, record: Record) -> None:
        self.num_moving -= 1
        request = _go_on(record)
        blocks = held.take(row)
        _note_held(engine, held)
        seq_id = engine.adopt(request, blocks, record.num_computed)
        self._cluster.note(request, engine.lifecycles, seq_id)

    def _end_change(self) -> None:
        self._num_changing -= 1


def _note_held(engine: VirtualEngine, held: HeldBlocks) -> None:
    """Tell the loop how many blocks are held: requests may wait for them while nothing else runs."""
    engine.loop.state.num_returning_blocks = held.num_blocks


def _go_on(record: Record) -> Request:
    """The request for its next engine: tokens generated so far are known tokens."""
    return replace(record.request, known_token_ids=(DUMMY_TOKEN,) * _count_known(record), is_accepted=True)


def _count_known(record: Record) -> int:
    return record.num_tokens - len(record.request.prompt_token_ids)
