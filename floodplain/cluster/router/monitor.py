"""Watches the load of a router's instances, and decides when groups drop layers and when they restore them. No I/O.

``policy.relief`` decides when and whether it pays, ``policy.drop`` which instances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import inf

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.state.request_table import RequestTable
from floodplain.cluster.state.roster import Instance
from floodplain.cluster.sums import StatsTable
from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.cost.model_shape import ModelShape
from floodplain.engine.config import DTYPE_BYTES
from floodplain.policy.drop import (
    ClusterLoad,
    DropMove,
    DropSizes,
    DropTimingSettings,
    GroupLoad,
    plan_drop,
    plan_largest,
)
from floodplain.policy.relief import DropCost, Priced, Progress, ReliefLoad, ReliefRule, exchanged_bytes, timing_of

logger = logging.getLogger(__name__)

FIRST_REMAP_S_PER_BYTE = 2.5e-10
"""Cost of a drop before one was measured: a quarter of a second per gigabyte on a host with 4 KiB pages."""
FIRST_BANDWIDTH = 1e9
"""Assumed bytes of KV per second between members."""
SETTINGS = DropTimingSettings()
NOTICE_S = 10.0
"""Least seconds between two notices to an autoscaler."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice to an autoscaler: KV memory is short, and no more can be made.

    ``missing_blocks`` do not exist, ``waiting_requests`` have no blocks on a device, memory has been short for
    ``short_s`` seconds, and ``grouped`` says whether layers are already dropped.
    """

    missing_blocks: int
    blocks: int
    waiting_requests: int
    short_s: float
    grouped: bool


class Monitor:
    """The load watcher of a router. Everything is called on the router's event loop.

    If ``is_priced``, a drop must pay (``policy.relief``); else it happens whenever memory is short. ``rule`` decides;
    the caller updates its meter of arrivals. ``load`` is that of the last ``look``; None before the first.
    """

    def __init__(
        self,
        table: RequestTable,
        sums: StatsTable,
        group_controller: GroupController,
        shape: ModelShape,
        *,
        is_priced: bool,
        most_stages: int,
        on_overload: Callable[[Notice], None],
        settings: DropTimingSettings = SETTINGS,
    ) -> None:
        timing = timing_of(settings, is_priced=is_priced)
        self.rule = ReliefRule(timing, is_priced=is_priced, most_stages=most_stages)
        self.load: ClusterLoad | None = None
        self.num_notices = 0
        self._table, self._sums, self._group_controller, self._shape = table, sums, group_controller, shape
        self._on_overload, self._settings = on_overload, settings
        self._noticed_s = self._priced_s = -inf

    def look(self, now: float) -> None:
        """Measure the load, and drop or restore layers if due. Does nothing if there is no instance."""
        if not len(self._table.roster):
            return
        load = self.load = self._find_load(now)
        self._learn(now)
        before, moment = self.rule.priced, self.rule.decide(self._find_relief_load(load))
        if self.rule.priced is not before and self.rule.priced is not None:
            self._log_price(self.rule.priced, now)
        if moment.move is DropMove.RESTORE:
            self._restore_all()
        is_stuck = self.rule.short_since_s is not None and load.is_grouped and not load.is_changing
        if moment.move is DropMove.DROP:
            is_stuck = not self._drop(moment.need_blocks)
        if is_stuck:
            self._note_overload(load, now)

    def _find_load(self, now: float) -> ClusterLoad:
        heads = self._find_heads()
        num_used = sum(self._sums.latest(one.epoch).num_used_blocks for one in heads)
        demanded = sum(one.num_demanded_blocks for one in heads)
        groups = list(self._group_controller.groups)
        return ClusterLoad(
            now=now,
            num_used_blocks=min(num_used, demanded),
            num_head_blocks=max(0, demanded - num_used) if self._count_absent(heads) else 0,
            num_blocks=sum(one.num_blocks for one in heads),
            undropped_blocks=sum(one.facts.num_blocks for one in self._table.roster),
            is_grouped=bool(groups),
            is_changing=any(group.state is not GroupState.PIPELINED for group in groups),
        )

    def _find_heads(self) -> list[Instance]:
        """Instances on which requests may be placed: all but grouped members that do not lead."""
        return [one for one in self._table.roster if one.part != "grouped"]

    def _count_absent(self, heads: list[Instance]) -> int:
        stats = [self._sums.latest(one.epoch) for one in heads]
        return sum(one.num_waiting + one.num_swapped for one in stats) + self._table.num_unplaced

    def _learn(self, now: float) -> None:
        for one in self._table.roster:
            if one.part is None:
                stats = self._sums.latest(one.epoch)
                progress = Progress(now, stats.num_steps, stats.num_generated_tokens, stats.num_running)
                self.rule.steps.note(one.epoch, progress)
            else:
                self.rule.steps.forget(one.epoch)

    def _find_relief_load(self, load: ClusterLoad) -> ReliefLoad:
        heads = self._find_heads()
        return ReliefLoad(
            load,
            tuple(one.facts.num_blocks for one in heads),
            sum(self._sums.latest(one.epoch).num_running for one in heads),
            self._count_absent(heads),
            self._sizes(),
            partial(self._cost, load),
        )

    def _log_price(self, priced: Priced, now: float) -> None:
        if now - self._priced_s < NOTICE_S:
            return
        self._priced_s = now
        prices = ", ".join(f"{lever} {price:.0f}" for lever, price in priced.decision.prices.items())
        reason = priced.decision.reason.value
        logger.info("memory is short: %s, token-seconds of %s; %s, %s", reason, prices, priced.overload, priced.step)

    def _cost(self, load: ClusterLoad, num_stages: int) -> DropCost:
        counts, sizes = self._group_controller.counts, self._sizes()
        num_dropped = sizes.num_layers * (num_stages - 1) / num_stages
        remap_s = num_dropped * sizes.layer_bytes * FIRST_REMAP_S_PER_BYTE
        if counts.num_changes["dropped"]:
            remap_s = counts.usable_s / counts.num_changes["dropped"]
        member_blocks = load.num_used_blocks / len(self._table.roster)
        kv_bytes = member_blocks * sizes.block_bytes * sizes.num_layers
        return DropCost(remap_s, exchanged_bytes(kv_bytes, num_stages), FIRST_BANDWIDTH)

    def _sizes(self) -> DropSizes:
        facts = next(iter(self._table.roster)).facts
        dtype_bytes = DTYPE_BYTES[facts.dtype]
        block_bytes = 2 * self._shape.kv_size * dtype_bytes * facts.block_tokens
        return DropSizes(self._shape.num_layers, self._shape.layer_bytes(dtype_bytes), block_bytes)

    def _drop(self, need_blocks: int) -> bool:
        """Begin drops. True if at least one group is being formed."""
        loads = [*self._single_loads(), *self._group_loads()]
        if len(loads) < 2:
            return False
        sizes, most_stages = self._sizes(), self.rule.most_stages
        plan = plan_drop(loads, need_blocks, sizes, most_stages) or plan_largest(loads, sizes, most_stages)
        is_begun = False
        for epochs in () if plan is None else plan.groups:
            try:
                self._group_controller.drop(epochs)
                is_begun = True
            except UserError as error:
                names = ", ".join(map(self._table.roster.name_of, epochs))
                logger.warning("instances %s are not made a group: %s", names, error)
        return is_begun

    def _single_loads(self) -> Iterator[GroupLoad]:
        for one in self._find_heads():
            if one.can_drop and one.state == "serving":
                yield GroupLoad((one.epoch,), (one.facts.num_blocks,), one.num_demanded_blocks)

    def _group_loads(self) -> Iterator[GroupLoad]:
        roster = self._table.roster
        for group in self._group_controller.groups:
            members = [one for epoch in group.epochs if (one := roster.get(epoch)) is not None]
            if group.state is GroupState.PIPELINED and len(members) == len(group.epochs):
                pools = tuple(one.facts.num_blocks for one in members)
                yield GroupLoad(group.epochs, pools, sum(one.num_demanded_blocks for one in members))

    def _restore_all(self) -> None:
        for group in list(self._group_controller.groups):
            if group.state is GroupState.PIPELINED:
                self._group_controller.restore(group.number)

    def _note_overload(self, load: ClusterLoad, now: float) -> None:
        short_s = now - (self.rule.short_since_s or now)
        if now - self._noticed_s < NOTICE_S or short_s < self._settings.overload_s:
            return
        self._noticed_s = now
        self.num_notices += 1
        absent = self._count_absent(self._find_heads())
        notice = Notice(load.num_missing_blocks, load.num_blocks, absent, round(short_s, 3), load.is_grouped)
        logger.warning("memory is short, and no more layers can be dropped: %s", asdict(notice))
        self._on_overload(notice)
