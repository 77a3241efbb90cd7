"""The monitor of a router: when it drops and restores, its notices to an autoscaler, its meters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.router.monitor import Monitor, Notice
from floodplain.cluster.router.webhook import Webhook
from floodplain.cluster.state.request_table import RequestTable
from floodplain.cluster.state.roster import Roster
from floodplain.cluster.sums import StatsTable
from floodplain.cluster.wire.group_messages import GroupOrder, Prepare
from floodplain.core.group_sizes import GroupSizes
from floodplain.core.groups import GroupState
from floodplain.engine.config import DTYPE_BYTES
from floodplain.engine.outputs import EngineStats
from floodplain.model.weights.open_model import open_model
from floodplain.policy.relief import ArrivalMeter, Progress, StepMeter, StreamStep
from tests.support.cluster_peers import FACTS
from tests.support.fake_server import Asked, serving, whole
from tests.support.loops import make_request

SHAPE = open_model("dummy:tiny-deep").config.shape
BEAT_S = 0.2


class Cluster:
    """A monitor over a router's book with instances whose statistics a test sets."""

    def __init__(self, num_instances: int, *, is_priced: bool = False) -> None:
        self.table, self.sums = RequestTable(Roster(1.0)), StatsTable()
        self.sent: list[GroupOrder] = []
        self.notices: list[Notice] = []
        self.now = 100.0
        send = lambda epoch, order, _: self.sent.append(order)  # noqa: E731
        self.group_controller = GroupController(self.table, SHAPE, send, lambda *_: None, lambda: None)
        self.monitor = Monitor(
            self.table, self.sums, self.group_controller, SHAPE, is_priced=is_priced, most_stages=4,
            on_overload=self.notices.append,
        )  # fmt: skip
        for slot in range(num_instances):
            self.table.roster.join(replace(FACTS, num_blocks=100), slot, 0.0).can_drop = True

    def give(self, num_requests: int) -> None:
        """Open and place requests of 25 blocks each."""
        for number in range(num_requests):
            self.table.open(make_request(f"{number}", tuple(range(99)), 0.0, max_tokens=50))
        self.table.place()

    def pass_time(self, seconds: float, *, used: int, waiting: int, rate: float = 0.0) -> None:
        """Look at each beat, while every instance reports this load."""
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for one in self.table.roster:
                last = self.sums.latest(one.epoch)
                stats = EngineStats(
                    num_blocks=100,
                    num_used_blocks=used,
                    num_running=used // 25,
                    num_waiting=waiting,
                    num_steps=last.num_steps + 1,
                    num_generated_tokens=last.num_generated_tokens + round(rate * BEAT_S),
                )
                self.sums.note(one.epoch, stats)
            self.monitor.look(self.now)

    def prepared(self) -> set[int]:
        return {order.epoch for order in self.sent if isinstance(order, Prepare)}


def test_layers_are_dropped_once_memory_was_short_for_half_a_second() -> None:
    cluster = Cluster(2)
    cluster.give(12)
    cluster.pass_time(0.4, used=100, waiting=2)
    assert not cluster.sent
    cluster.pass_time(0.4, used=100, waiting=2)
    assert cluster.prepared() == {1, 2}


@pytest.mark.parametrize(("used", "waiting", "num_requests"), [(100, 0, 8), (50, 0, 4), (100, 2, 7)])
def test_nothing_is_dropped_while_demand_fits(used: int, waiting: int, num_requests: int) -> None:
    cluster = Cluster(2)
    cluster.give(num_requests)
    cluster.pass_time(20, used=used, waiting=waiting)
    assert not cluster.sent and not cluster.notices


@pytest.mark.parametrize("is_base", [True, False])
def test_a_drop_is_made_only_if_more_streams_make_more_tokens(is_base: bool) -> None:
    """A step takes constant time (``is_base``), or time proportional to its streams."""
    cluster = Cluster(2, is_priced=True)
    now, tokens = 0.0, 0
    for steps, size in enumerate((1, 2, 3, 4) * 10):
        now, tokens = now + (0.1 if is_base else 0.1 * size), tokens + size
        cluster.monitor.rule.steps.note(9, Progress(now, steps + 1, tokens, size))
    cluster.give(60)
    cluster.pass_time(2, used=100, waiting=26)
    assert cluster.prepared() == ({1, 2} if is_base else set())


@pytest.mark.parametrize("num_instances", [2, 8])
def test_each_member_of_a_drop_sends_its_own_kv(num_instances: int) -> None:
    cluster = Cluster(num_instances, is_priced=True)
    cluster.give(num_instances * 4)
    cluster.pass_time(0.4, used=100, waiting=0)
    assert cluster.monitor.load is not None
    kv_bytes = 100 * FACTS.block_tokens * SHAPE.kv_bytes_per_token(DTYPE_BYTES[FACTS.dtype])
    assert cluster.monitor._cost(cluster.monitor.load, 2).exchange_bytes == kv_bytes / 2


def test_groups_are_restored_when_it_has_been_calm_and_not_before() -> None:
    cluster = Cluster(2)
    cluster.give(12)
    cluster.pass_time(1, used=100, waiting=2)
    (group,) = cluster.group_controller.groups
    plan = cluster.group_controller.plan_of(group.number)
    assert plan is not None
    plan.sizes = GroupSizes((), ((), ()), (0, 0), 20, 20, 10)
    group.state = GroupState.PIPELINED
    cluster.pass_time(20, used=100, waiting=2)
    assert group.state is GroupState.PIPELINED
    assert cluster.notices and cluster.notices[0].grouped  # no more can be dropped
    for entry in [entry for one in cluster.table.roster for entry in cluster.table.entries_of(one.epoch).values()]:
        cluster.table.close(entry)
    for entry in [*cluster.table._unplaced.values()]:
        cluster.table.close(entry)
    cluster.pass_time(9, used=0, waiting=0)
    assert group.state is GroupState.PIPELINED
    cluster.pass_time(2, used=0, waiting=0)
    assert group.state is GroupState.PLANNING


@pytest.mark.parametrize("is_priced", [False, True])
def test_without_prices_groups_merge_if_memory_stays_short(is_priced: bool) -> None:
    cluster = Cluster(4, is_priced=is_priced)
    cluster.give(24)
    for number, epochs in enumerate(([1, 2], [3, 4]), start=1):
        cluster.group_controller.drop(epochs)
        group, plan = cluster.group_controller.groups.get(number), cluster.group_controller.plan_of(number)
        assert group is not None and plan is not None
        group.state, plan.kept = GroupState.PIPELINED, (range(6), range(6, 12))
        for epoch, part in zip(epochs, ("leading", "grouped"), strict=True):
            cluster.table.roster.expect(epoch).part = part
    cluster.monitor.rule._timing._num_drops = 1  # counts as a drop by the monitor
    cluster.sent.clear()
    cluster.pass_time(12, used=100, waiting=2)
    assert cluster.prepared() == (set() if is_priced else {1, 2, 3, 4})
    assert [group.number for group in cluster.group_controller.groups] == ([1, 2] if is_priced else [1, 2, 3])
    assert bool(cluster.notices) == is_priced


def test_one_instance_alone_notifies_an_autoscaler_every_ten_seconds() -> None:
    cluster = Cluster(1)
    cluster.give(12)
    cluster.pass_time(25, used=100, waiting=8)
    assert not cluster.sent
    assert [notice.grouped for notice in cluster.notices] == [False] * len(cluster.notices)
    assert 2 <= len(cluster.notices) <= 3 and cluster.notices[0].missing_blocks == 12 * 25 - 100


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.lists(st.integers(1, 60), min_size=40, max_size=80))
def test_a_steps_time_is_learned_from_what_passes(base_s: float, token_s: float, sizes: list[int]) -> None:
    meter, now, tokens = StepMeter(), 0.0, 0
    for steps, size in enumerate(sizes):
        now, tokens = now + base_s + token_s * size, tokens + size
        meter.note(7, Progress(now, steps + 1, tokens, size))
    step = meter.step()
    assert step is not None
    mean = sum(sizes[1:]) / len(sizes[1:])
    right = StreamStep(base_s, token_s)
    assert step.tokens_per_s(mean) == pytest.approx(right.tokens_per_s(mean), rel=1e-6)
    if max(sizes[1:]) >= 1.5 * min(sizes[1:]):
        assert step.token_s == pytest.approx(token_s, abs=1e-6)


def test_steps_of_a_life_that_ended_are_not_mixed_with_the_next() -> None:
    meter = StepMeter()
    meter.note(1, Progress(0.0, 100, 1000, 4))
    meter.note(1, Progress(1.0, 5, 20, 4))  # counters fell: a new process
    assert meter.step() is None
    meter.forget(1)
    meter.note(1, Progress(2.0, 10, 40, 4))
    assert meter.step() is None


def test_arrivals_are_counted_in_their_window() -> None:
    meter = ArrivalMeter()
    for second in range(100):
        meter.note_arrival(float(second))
    assert meter.tokens_per_s(99.5, 10.0) == pytest.approx(10 / 10 * 128, rel=0.15)
    for _ in range(500):
        meter.note_end(10)
    assert meter.output_tokens == pytest.approx(10, abs=0.1)
    assert meter.tokens_per_s(300.0, 10.0) == 0


async def test_a_webhook_posts_json_and_survives_a_server_that_is_not_there() -> None:
    got: list[Any] = []

    async def take(asked: Asked) -> None:
        got.append(asked.json())
        await asked.say(whole(200, b""))

    async with serving(take) as url:
        hook = Webhook(f"{url}/scale")
        hook.post({"event": "overload"})
        hook.post({"event": "left out: the first one is under way"})
        await hook.close()
    hook.post({"event": "nothing listens"})
    await hook.close()
    assert got == [{"event": "overload"}]
