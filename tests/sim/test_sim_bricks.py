"""Virtual time, the line of a step's cost, and links: examples by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_line import StepLine
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import PrefillChunk, Relocation, StepPlan, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction, Link, Location, Tier
from floodplain.sim.environment import Environment
from floodplain.sim.links import VirtualLinks
from floodplain.sim.machine import resolve_machine
from floodplain.sim.scenario import make_scenario
from floodplain.sim.virtual_engine import DUMMY_TOKEN, dummy_result
from tests.support.examples import examples

# -- time ------------------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_and_then_of_scheduling() -> None:
    environment, happened = Environment(), []
    for name, when_s in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        environment.schedule(when_s, lambda name=name: happened.append((name, environment.now)))  # type: ignore[misc]
    environment.run()
    assert happened == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


@pytest.mark.parametrize("when_s", [0.999, -1.0, float("nan")])
def test_an_event_in_the_past_or_at_no_time_is_refused(when_s: float) -> None:
    environment = Environment()
    environment.schedule(1.0, lambda: None)
    environment.run()
    with pytest.raises(InvariantError, match="is scheduled at"):
        environment.schedule(when_s, lambda: None)


def test_an_event_may_follow_at_the_same_time() -> None:
    environment, happened = Environment(), []
    environment.schedule(1.0, lambda: environment.schedule(1.0, lambda: happened.append(environment.now)))
    environment.run()
    assert happened == [1.0]


def test_what_is_due_later_stays() -> None:
    environment, happened = Environment(), []
    for when_s in (1.0, 2.0, 3.0):
        environment.schedule(when_s, lambda when_s=when_s: happened.append(when_s))  # type: ignore[misc]
    environment.run(until_s=2.0)
    assert (happened, environment.now) == ([1.0, 2.0], 2.0)
    environment.run()
    assert happened == [1.0, 2.0, 3.0]


@settings(max_examples=examples(30))
@given(st.lists(st.floats(0, 100), max_size=30))
def test_time_never_goes_back(times: list[float]) -> None:
    environment, seen = Environment(), []
    for when_s in times:
        environment.schedule(when_s, lambda: seen.append(environment.now))
    environment.run()
    assert seen == sorted(times)


# -- steps -----------------------------------------------------------------------------------------------------------

LINE = StepLine(base_s=0.01, decode_s=0.001, prefill_token_s=0.0001)


def plan(num_decodes: int = 0, *chunks: int) -> StepPlan:
    decodes = tuple(SeqId(number) for number in range(num_decodes))
    prefills = tuple(PrefillChunk(SeqId(50 + n), 0, tuple(range(size)), n == 0) for n, size in enumerate(chunks))
    return StepPlan(step_id=7, decodes=decodes, prefills=prefills)


def test_a_step_costs_its_base_its_decodes_and_its_prompts_tokens() -> None:
    assert LINE.time_s(plan(5)) == pytest.approx(0.015)
    assert LINE.time_s(plan(0, 100)) == pytest.approx(0.02)
    assert LINE.time_s(plan(2, 60, 40)) == pytest.approx(0.022)


def test_a_plan_that_only_moves_kv_takes_no_time_of_the_device() -> None:
    assert LINE.time_s(plan()) == 0.0


def test_there_is_a_token_for_each_that_samples() -> None:
    result = dummy_result(plan(3, 60, 40))  # the first chunk samples, the second does not
    assert (result.step_id, result.token_ids) == (7, [DUMMY_TOKEN] * 4)


# -- links -----------------------------------------------------------------------------------------------------------


def copy(kind: TransferKind, *tiers: Tier) -> Transfer:
    blocks = tuple(BlockId(number) for number in range(len(tiers)))
    return Transfer(1, kind, SeqId(0), blocks, tuple(Location(tier, n) for n, tier in enumerate(tiers)))


OUT, BACK, BEHIND = TransferKind.SWAP_OUT, TransferKind.SWAP_IN, TransferKind.BACKUP
HOST, PEER = Tier.HOST, Tier.PEER


def make_links() -> VirtualLinks:
    """Return links for blocks of 1000 bytes: 0.5 s of latency and 1 s a block to the host, 0.1 s to the peer."""
    return VirtualLinks({HOST: Link(HOST, 1000.0, 0.5), PEER: Link(PEER, 10_000.0)}, block_bytes=1000)


def test_a_copy_takes_the_latency_and_its_bytes() -> None:
    assert make_links().start(copy(OUT, HOST, HOST, HOST), now=10.0) == 13.5


def test_a_direction_may_have_a_bandwidth_of_its_own() -> None:
    links = VirtualLinks({HOST: Link(HOST, 1000.0, 0.5)}, 1000, {(HOST, Direction.INBOUND): 4000.0})
    assert links.start(copy(OUT, HOST, HOST), 10.0) == 12.5
    assert links.start(copy(BACK, HOST, HOST), 10.0) == 11.0


def test_named_links_copy_both_ways_as_fast_as_they_were_measured() -> None:
    content = {"model": "llama-3.1-8b", "device": "rtx4090", "swap": {"memory": "1GiB", "link": "c2c"}}
    machine = resolve_machine(make_scenario(content, "test", Path()))
    assert machine.bandwidths[HOST, Direction.INBOUND] == pytest.approx(419e9, rel=0.01)
    assert machine.bandwidths[HOST, Direction.OUTBOUND] == pytest.approx(371e9, rel=0.01)
    assert machine.links[0].bandwidth == min(machine.bandwidths.values())


def test_copies_of_one_direction_follow_each_other() -> None:
    links = make_links()
    assert links.start(copy(OUT, HOST), 10.0) == 11.5
    assert links.start(copy(BEHIND, HOST), 10.0) == 13.0
    assert links.start(copy(OUT, HOST), 20.0) == 21.5


def test_the_two_directions_and_the_tiers_do_not_disturb_each_other() -> None:
    links = make_links()
    links.start(copy(OUT, HOST, HOST), 10.0)
    assert links.start(copy(BACK, HOST), 10.0) == 11.5
    assert links.start(copy(OUT, PEER), 10.0) == pytest.approx(10.1)


def test_a_copy_over_several_tiers_is_as_slow_as_the_slowest() -> None:
    assert make_links().start(copy(BACK, PEER, PEER, HOST), 10.0) == 11.5


@pytest.mark.parametrize(("source", "target"), [(PEER, HOST), (HOST, PEER)])
def test_a_copy_between_tiers_is_as_slow_as_the_slower_and_takes_one_direction_of_each(
    source: Tier, target: Tier
) -> None:
    links = make_links()
    slots = (tuple(Location(tier, number) for number in range(2)) for tier in (source, target))
    assert links.relocate(Relocation(0, *slots), 10.0) == 12.5
    alone = make_links()
    for tier in (source, target):
        after_s = alone.start(copy(OUT, tier), 10.0) - 10.0, alone.start(copy(BACK, tier), 10.0) - 10.0
        busy_s = 2.5 if tier is target else 0.0, 2.5 if tier is source else 0.0  # written there, read here
        ends = links.start(copy(OUT, tier), 10.0), links.start(copy(BACK, tier), 10.0)
        assert ends == pytest.approx([10.0 + busy + after for busy, after in zip(busy_s, after_s, strict=True)])


def test_bytes_are_counted_by_kind() -> None:
    links = make_links()
    links.start(copy(OUT, HOST, PEER), 0.0)
    links.start(copy(OUT, HOST), 0.0)
    links.start(copy(BACK, HOST), 0.0)
    assert links.moved_bytes == {OUT: 3000, BACK: 1000, BEHIND: 0}


def test_a_resumed_request_costs_a_decode_and_no_prompt() -> None:
    """The engine runs and prices a chunk of one token as a decode."""
    back = PrefillChunk(SeqId(0), 9, (1,), samples=True)
    assert StepLine(1.0, 0.1, 7.0).time_s(StepPlan(0, prefills=(back,))) == pytest.approx(1.1)
    assert StepLine(1.0, 0.1, 7.0).time_s(StepPlan(0, (SeqId(1),), (back,))) == pytest.approx(1.2)
