"""Small parts of the router: silent instances, sums of counters, restarts of children, contradictory flags."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.cli.instance import environment_of_instances, instance_command
from floodplain.cli.options import Parser, add_dataclass_flags, dataclass_from, resolve
from floodplain.cluster.engine_flags import config_of_instance
from floodplain.cluster.instance import session
from floodplain.cluster.instance.session import ROUTER_SILENCE_S
from floodplain.cluster.launch.launcher import (
    CALM_S,
    FIRST_DELAY_S,
    MAX_FAILED_STARTS,
    MOST_DELAY_S,
    SETTLED_S,
    Restarts,
)
from floodplain.cluster.migration.controller import STEP_TIMEOUT_S, MigrationController
from floodplain.cluster.migration.table import MigrationState
from floodplain.cluster.router.router import Router
from floodplain.cluster.settings import (
    LEAST_TIMEOUT_S,
    MOST_TIMEOUT_S,
    InstanceConfig,
    split_address,
)
from floodplain.cluster.state.request_table import SUSPECT_PLACEMENTS, RequestTable
from floodplain.cluster.state.roster import PrefixMemory, Roster
from floodplain.cluster.sums import StatsTable, since
from floodplain.cluster.wire.messages import Abort, InstanceFacts, KvHeld, KvPulled, Welcome
from floodplain.core.errors import UserError
from floodplain.core.hashing import BlockKey
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats, ExpansionFacts
from tests.fakes.slots import FakeSlots
from tests.support.loops import make_request

FACTS = InstanceFacts("1", "f", "float32", 64, 4, 12, "host", 1)

# -- silence -----------------------------------------------------------------------------------------------------------


def test_only_instances_that_are_silent_for_too_long_are_found() -> None:
    roster = Roster(silence_s=1.0)
    silent, speaks = roster.join(FACTS, None, 0.0), roster.join(FACTS, None, 0.0)
    for tick in range(1, 12):
        now = tick * 0.2
        roster.hear(speaks.epoch, now)
        assert roster.find_silent(now) == ([silent.epoch] if now > 1.2 else [])
    roster.remove(silent.epoch)
    assert not roster.hear(silent.epoch, 9.0) and roster.hear(speaks.epoch, 9.0)
    assert roster.join(FACTS, None, 9.0).epoch > speaks.epoch


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=30), st.floats(2.0, 100.0))
def test_a_delayed_router_takes_no_instance_for_dead(gaps_s: list[float], held_up_s: float) -> None:
    roster = Roster(silence_s=1.0)
    one = roster.join(FACTS, None, 0.0)
    now = 0.0
    for gap_s in gaps_s:
        now += gap_s
        roster.hear(one.epoch, now)
        assert roster.find_silent(now) == []
    now += held_up_s
    assert roster.find_silent(now) == []  # its messages may still lie in the socket
    roster.hear(one.epoch, now + 0.1)
    assert roster.find_silent(now + 0.4) == []
    # an instance that still sends nothing is silent
    late = [now + 0.4 + tick * 0.25 for tick in range(1, 6)]
    assert [roster.find_silent(when) for when in late][-1] == [one.epoch]


@pytest.mark.parametrize("timeout_s", [LEAST_TIMEOUT_S, 1.0, 60.0, MOST_TIMEOUT_S])
@pytest.mark.parametrize("is_alive", [True, False])
async def test_an_instance_hangs_up_on_a_silent_router_alone(
    timeout_s: float, is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever --instance-timeout is, on which the time between two beats depends."""
    now, beat_s = [0.0], Router(timeout_s, {}, FakeSlots(), lambda _: None)._beat_s
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    link = SimpleNamespace(send=lambda frame: None)
    one = session.Session(cast(Any, link), Welcome(1, beat_s, timeout_s), None)

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if is_alive:
            one._heard_s = now[0] - beat_s  # the next beat is under way
        assert now[0] < 20 * ROUTER_SILENCE_S, "it goes on"

    monkeypatch.setattr(session, "asyncio", SimpleNamespace(sleep=sleep))
    if is_alive:
        with pytest.raises(AssertionError, match="it goes on"):
            await one._beat()
    else:
        await one._beat()
        assert now[0] <= ROUTER_SILENCE_S + beat_s


def test_prefixes_are_leading_keys_and_the_oldest_are_forgotten() -> None:
    memory = PrefixMemory(max_keys=3)
    a, b, c, d = (BlockKey(bytes([n])) for n in range(4))
    memory.note([a, b])
    assert memory.count_known([a, b, c]) == 2 and memory.count_known([b, a]) == 2 and memory.count_known([c, a]) == 0
    memory.note([c, a, d])
    assert (memory.count_known([b]), memory.count_known([a, c, d])) == (0, 3)


# -- sums --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50), st.booleans()), max_size=30))
def test_counters_never_fall_when_instances_end(story: list[tuple[int, int, bool]]) -> None:
    table, counted, epoch_of = StatsTable(), 0, {slot: slot for slot in range(1, 5)}
    latest: dict[int, int] = {}
    for slot, number, dies in story:
        epoch = epoch_of[slot]
        before = table.total()
        latest[epoch] = latest.get(epoch, 0) + number
        counted += number
        table.note(epoch, EngineStats(num_steps=latest[epoch], num_running=2, swap_bytes={("out", "host"): number}))
        if dies:
            table.retire(epoch)
            epoch_of[slot] += 10
        total = table.total()
        assert total.num_steps == counted >= before.num_steps
    living = {epoch for epoch in latest if epoch in epoch_of.values()}
    assert table.total().num_running == 2 * len(living)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_process_that_joins_again_counts_nothing_twice(steps: list[int]) -> None:
    """One engine in successive lives: its own counters continue."""
    table, before, counted = StatsTable(), EngineStats(), 0
    for epoch, number in enumerate(steps, start=1):
        counted += number
        facts = ExpansionFacts(loaded_bytes=counted, near_loaded_bytes=counted, num_near=2)
        now = EngineStats(num_steps=counted, num_running=3, swap_bytes={("out", "host"): counted}, expansion=facts)
        table.note(epoch, since(now, before))
        assert (table.total().num_running, table.total().expansion.num_near) == (3, 0)
        table.retire(epoch)
        before = now
    total = table.total()
    assert (total.num_steps, total.swap_bytes[("out", "host")]) == (counted, counted)
    assert (total.expansion.loaded_bytes, total.expansion.near_loaded_bytes) == (counted, counted)


def test_recalls_are_counted_once_and_expansions_are_a_mean() -> None:
    table = StatsTable()
    one = EngineStats(
        num_blocks=1,
        block_tokens=16,
        num_recalls=1,
        recall_times_s=(0.5,),
        expansion=ExpansionFacts(3.0, 2, 10, num_near=1),
    )
    table.note(1, one)
    table.note(2, EngineStats(num_blocks=1, block_tokens=16, num_recalls=1, recall_times_s=(0.25,)))
    table.note(1, replace(one, num_recalls=2, recall_times_s=(0.5, 0.75)))
    total = table.total()
    assert (total.num_recalls, total.recall_times_s) == (3, (0.5, 0.25, 0.75))
    assert (total.num_blocks, total.block_tokens) == (2, 16)
    assert (total.expansion.expansion, total.expansion.num_streamed, total.expansion.loaded_bytes) == (2.0, 2, 10)
    assert total.expansion.num_near == 1
    table.retire(1)
    total = table.total()
    assert (total.num_recalls, total.expansion.expansion, total.expansion.loaded_bytes) == (3, 1.0, 10)


# -- restarts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(0, 2) | st.floats(0, 1000), max_size=60))
def test_restarts_are_bounded_and_begin_anew_after_calm(lives_s: list[float | None]) -> None:
    restarts, num_failed, before_s = Restarts(), 0, 0.0
    for life_s in lives_s:
        delay_s = restarts.next_delay_s(life_s)
        num_failed = num_failed + 1 if life_s is None or life_s < SETTLED_S else 0
        assert (delay_s is None) == (num_failed >= MAX_FAILED_STARTS)
        if delay_s is None:
            return
        assert FIRST_DELAY_S <= delay_s <= MOST_DELAY_S
        if life_s is not None and life_s >= CALM_S:
            assert delay_s == FIRST_DELAY_S
        elif before_s:
            assert delay_s == min(MOST_DELAY_S, 2 * before_s)
        before_s = delay_s


# -- flags -------------------------------------------------------------------------------------------------------------


def test_flags_of_one_engine_are_refused_for_many_with_the_reason() -> None:
    engine = EngineConfig(model="m")
    for join in ("host:99999", f"host:{'9' * 5000}", "a..b:1", f"{'a' * 64}:1", ":1", "host:+1"):
        with pytest.raises(UserError, match="--join must be HOST:PORT"):
            InstanceConfig(join=join, instance_token_file="f")
    with pytest.raises(UserError, match="--device-name gpu is for one engine, and --instances 2 gives the same"):
        config_of_instance(replace(engine, device_name="gpu"), 2, 0)
    with pytest.raises(UserError, match="--coordinator http://c is for one engine"):
        config_of_instance(replace(engine, coordinator="http://c", lend="auto"), 2, 0)
    with pytest.raises(UserError, match="--device cuda:1 is one GPU, and --instances 2 are as many engines"):
        config_of_instance(replace(engine, device="cuda:1"), 2, 0)
    devices = [config_of_instance(replace(engine, device="cuda"), 2, index).device for index in range(2)]
    assert devices == ["cuda:0", "cuda:1"]
    assert config_of_instance(engine, 2, 1) == engine


def test_addresses_are_split_at_their_port() -> None:
    assert split_address("h:1", "--f") == ("h", 1) and split_address("[::1]:65535", "--f") == ("::1", 65535)


def test_the_command_of_an_instance_has_all_flags_and_no_secret() -> None:
    """The verb's own parser reads the command back as the same configuration."""
    config = EngineConfig(
        model="m", policy="fcfs", kv_memory=2**20, pack_weights=False, swap="none", seed=3, kv_expansion="1.5"
    )
    command = instance_command(config, is_quiet=True)
    begin = command.index("instance") + 1
    parser = Parser(prog="instance")
    parser.add_argument("-q", "--quiet", action="store_true")
    add_dataclass_flags(parser, InstanceConfig)
    add_dataclass_flags(parser, EngineConfig)
    args = resolve(parser, [*command[begin:], "--join", "127.0.0.1:1"], {})
    assert dataclass_from(args, EngineConfig) == config
    assert args.instance_token_file == "-"


def test_children_get_no_flag_by_a_variable() -> None:
    environ = {"PATH": "p", "FLOODPLAIN_PORT": "1", "FLOODPLAIN_NO_FLASHINFER": "1"}
    assert environment_of_instances(environ, 3) == {
        "PATH": "p",
        "FLOODPLAIN_NO_FLASHINFER": "1",
        "OMP_NUM_THREADS": "3",
    }
    assert environment_of_instances({"OMP_NUM_THREADS": "7"}, 3) == {"OMP_NUM_THREADS": "7"}


# -- migrations --------------------------------------------------------------------------------------------------------


def two_movable_instances() -> tuple[RequestTable, list[int]]:
    table = RequestTable(Roster(60.0))
    epochs = [table.roster.join(FACTS, None, 0.0).epoch for _ in range(2)]
    for epoch in epochs:
        table.roster.expect(epoch).can_move = True
    return table, epochs


def test_a_suspect_does_not_migrate() -> None:
    table, epochs = two_movable_instances()
    controller = MigrationController(table, lambda *message: None, lambda: None)
    entry = table.open(make_request("r", (1, 2, 3), 0.0, max_tokens=9))
    table.place()
    table.take(entry, 5)
    entry.num_failed_placements = SUSPECT_PLACEMENTS
    source = entry.epoch or 0
    (target,) = set(epochs) - {source}
    with pytest.raises(UserError, match="runs no request that could move"):
        controller.move_one(source, target)
    table.take(entry, 6)  # no suspect any more
    assert controller.move_one(source, target)


def test_a_migration_that_expires_leaves_a_request_that_was_given_back_where_it_is() -> None:
    (table, epochs), sent = two_movable_instances(), list[Any]()
    controller = MigrationController(table, lambda *message: sent.append(message), lambda: None)
    entry = table.open(make_request("r", (1, 2, 3), 0.0, max_tokens=9))
    table.place()
    table.take(entry, 5)
    source = entry.epoch
    (target,) = set(epochs) - {source}
    number = controller.move_one(source or 0, target)
    controller.take(KvHeld(source or 0, number, True, "h:1"), ())
    num_sent = len(sent)
    for late in (
        KvHeld(source or 0, number, True, "h:1"),
        KvHeld(target, number, True, "h:1"),
        KvPulled(target, number, True),
    ):
        controller.take(late, (1,))  # sent twice, or not awaited
    assert len(sent) == num_sent
    assert [one.state for one in controller.migrations] == [MigrationState.STOPPING]
    assert table.give_back(entry) and table.place() == [entry]
    placement = entry.epoch, entry.ticket
    controller.look(time.monotonic() + 2 * STEP_TIMEOUT_S)
    assert (entry.epoch, entry.ticket) == placement and not len(controller.migrations)
    assert not any(isinstance(message, Abort) for _, message, _ in sent)
