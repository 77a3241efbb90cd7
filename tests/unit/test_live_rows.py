"""Rows of live requests and the memory beside them, looked at after every step of a loop that preempts at random."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import floodplain
from floodplain.core.blocks import BlockState
from floodplain.core.lifecycle import EventKind, residence_s
from floodplain.core.plan import LIMITS, Transfer, TransferKind
from floodplain.core.request import FinishReason
from floodplain.core.sequence import Status
from floodplain.engine.outputs import EngineStats
from floodplain.engine.watch import WHY, why_waiting
from floodplain.live.changes import Snapshot, apply, change, encode, whole
from floodplain.live.rows import MOST_ENDED, MOST_EVENTS, LiveView, Row, SequenceRows, events_of
from floodplain.server.live import Latencies, memory_of, snapshot_of
from tests.support.driver import Driver
from tests.support.loops import RandomPolicy, make_loop

STORMS = range(4)


def storm(seed: int, num_requests: int = 9) -> Iterator[Driver]:
    """A loop after each of its steps and settled copies, from the first request to the last end."""
    dice = Random(seed)
    driver = Driver(make_loop(policy=RandomPolicy(), num_blocks=10, num_slots=20, seed=seed))
    for _ in range(num_requests):
        prompt = [dice.randrange(1000) for _ in range(dice.randint(1, 18))]
        driver.submit(prompt, max_tokens=dice.randint(1, 12), ignore_eos=True)
        yield driver
    live = list(driver.requests)
    while driver.loop.has_unfinished:
        if driver.executor.transfers and dice.random() < 0.7:
            driver.settle()
        elif driver.plan() and driver.pending:
            driver.complete()
        if live and dice.random() < 0.03:
            driver.loop.finish(live.pop(), FinishReason.ABORT, driver.tick())
        yield driver


@pytest.mark.parametrize("seed", STORMS)
def test_each_live_request_has_one_row_that_is_true(seed: int) -> None:
    rows_of = SequenceRows()
    states: Counter[str] = Counter()
    for driver in storm(seed):
        state = driver.loop.state
        rows = rows_of.look(list(state.sequences.values()))
        live = {number: row for number, row in rows.items() if row.reason is None}
        assert live.keys() == {int(n) for n, seq in state.sequences.items() if seq.status is not Status.FINISHED}
        for number, row in live.items():
            seq = next(one for one in state.sequences.values() if one.seq_id == number)
            assert (row.state, row.prompt) == (seq.status.value, seq.num_prompt)
            assert row.tokens == len(seq.tokens) - seq.num_prompt
            assert row.events == events_of(seq.lifecycle)
            assert row.blocks == (seq.num_arriving or len(seq.blocks))
            states[row.state] += 1
    assert states.keys() >= {"waiting", "running", "swapped", "loading"}  # else the storm tests nothing


@pytest.mark.parametrize("seed", STORMS)
def test_ended_requests_keep_a_row_with_their_end(seed: int) -> None:
    rows_of = SequenceRows()
    seen: set[int] = set()
    driver = None
    for driver in storm(seed):
        seen |= {int(n) for n, seq in driver.loop.state.sequences.items() if seq.status is not Status.FINISHED}
        rows = rows_of.look(list(driver.loop.state.sequences.values()))
    assert driver is not None
    rows = rows_of.look([])
    assert rows.keys() == seen
    for number, row in rows.items():
        assert row.reason is not None and row.events[-1][1] == "finished" and row.events[0][1] == "arrived"
        assert (row.reason == "abort") == (number not in {int(n) for n in driver.finished})
        assert (row.first_token_s is None) == (row.tokens == 0)


def test_rows_of_ended_requests_are_bounded() -> None:
    driver = Driver(make_loop(max_num_seqs=8))
    rows_of = SequenceRows()
    for _ in range(MOST_ENDED + 5):
        driver.submit([1, 2], max_tokens=1)
        rows_of.look(list(driver.loop.state.sequences.values()))
        driver.run()
    rows = rows_of.look([])
    assert len(rows) == MOST_ENDED and min(rows) == 5


@pytest.mark.parametrize("seed", STORMS)
def test_swaps_are_told_with_their_blocks(seed: int) -> None:
    """A preemption with blocks is a swap-out; one without drops the KV. Blocks of a swap-in were copied before."""
    rows_of, driver = SequenceRows(), None
    for driver in storm(seed):
        rows_of.look(list(driver.loop.state.sequences.values()))
    assert driver is not None
    events = [event for row in rows_of.look([]).values() for event in row.events]
    preempted = [blocks for _, kind, blocks in events if kind == "preempted"]
    preemptions = driver.loop.counters.preemptions
    assert min(preemptions.values()) > 0  # else the storm tests nothing
    assert sum(blocks > 0 for blocks in preempted) == preemptions["swap"]
    assert sum(blocks == 0 for blocks in preempted) == preemptions["recompute"]
    loaded = sum(blocks for _, kind, blocks in events if kind == "swapped_in")
    assert 0 < loaded <= sum(len(transfer.blocks) for transfer in moved_in(driver))


def moved_in(driver: Driver) -> list[Transfer]:
    return [move for plan in driver.executor.plans for move in plan.transfers if move.kind is TransferKind.SWAP_IN]


def test_events_of_a_long_life_are_its_arrival_and_the_last_ones() -> None:
    driver = Driver(make_loop())
    lifecycle = driver.loop.state.sequences[driver.submit([1, 2, 3], max_tokens=2)].lifecycle
    for number in range(MOST_EVENTS):
        lifecycle.record(EventKind.SCHEDULED, 2.0 + number)
        lifecycle.record(EventKind.PREEMPTED, 2.5 + number, num_swapped_blocks=number)
    events = events_of(lifecycle)
    assert len(events) == MOST_EVENTS and events[0][1] == "arrived"
    assert events[-1] == (2.5 + MOST_EVENTS - 1, "preempted", MOST_EVENTS - 1)
    assert len(residence_s(lifecycle)) == MOST_EVENTS  # the whole list is untouched


# -- memory ------------------------------------------------------------------------------------------------------------

counts = st.integers(0, 10**6)
block_counts = st.fixed_dictionaries({state.value: counts for state in BlockState if state is not BlockState.ABSENT})


@given(block_counts, st.integers(1, 2**20), counts)
def test_parts_of_the_pool_sum_to_the_pool(blocks: dict[str, int], block_bytes: int, race: int) -> None:
    """Also if counts of blocks are of different moments, so that they sum to more or less than the pool has."""
    num_blocks = max(0, sum(blocks.values()) + race - 5 * 10**5)
    stats = EngineStats(
        kv_blocks=blocks,
        kv_bytes={"local": num_blocks * block_bytes, "host": 7, "peer": 5},
        num_blocks=num_blocks,
        lease_bytes={("producer", "a"): 3, ("producer", "b"): 4, ("consumer", "c"): 9},
    )
    memory = memory_of(stats)
    parts = [memory[name] for name in ("running", "moving", "cached", "free")]
    assert sum(parts) == memory["pool"] == num_blocks * block_bytes and min(parts) >= 0
    assert (memory["swapped"], memory["lent"], memory["borrowed"]) == (7, 7, 9)


@pytest.mark.parametrize("seed", STORMS)
def test_parts_of_the_pool_are_those_of_the_ledger(seed: int) -> None:
    for driver in storm(seed, 4):
        ledger = driver.loop.state.ledger
        states = ledger.count_states()
        stats = EngineStats(
            kv_blocks={state.value: count for state, count in states.items() if state is not BlockState.ABSENT},
            kv_bytes={"local": ledger.num_blocks * 8},
            num_blocks=ledger.num_blocks,
        )
        memory = memory_of(stats)
        assert memory["free"] == 8 * states[BlockState.FREE]
        assert memory["running"] == 8 * states[BlockState.OWNED]


# -- why requests wait -------------------------------------------------------------------------------------------------


def row(number: int, state: str = "waiting", prompt: int = 10) -> Row:
    return Row(number, 0, 0, state, prompt, ((0.0, "arrived", 0),), None, None)


def why(*rows: Row, available: int = 100, places: int = 8, limits: tuple[str, ...] = ()) -> str | None:
    return why_waiting(rows, max_num_seqs=places, block_tokens=4, num_available=available, limits=limits)


def test_why_requests_wait_names_the_scarce_thing() -> None:
    assert why(row(1, "running")) is None
    assert "--max-num-seqs" in str(why(row(1), row(2, "running"), places=1))
    assert "needs 3 KV blocks, and 2 can be had" in str(why(row(2, prompt=90), row(1), available=2))
    assert why(row(1), limits=("swap_full",)) == "swap space is full"
    assert why(row(1, "swapped")) == "it is the turn of other requests"
    assert why(row(1, "swapped"), row(2, "running")) == "it is the turn of other requests"
    assert why(row(1), row(2, "running")._replace(first_token_s=1.0)) == "it is the turn of other requests"
    assert why(row(1), row(2, "finished")._replace(reason="abort")) == "it is the turn of other requests"
    assert "prompts of other requests are computed first" in str(why(row(1), row(2, "running")))
    assert WHY.keys() == {reason.value for reason in LIMITS}


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", STORMS)
def test_messages_rebuild_the_snapshots_that_they_are_of(seed: int) -> None:
    rows_of, seen, last = SequenceRows(), Snapshot({}), None
    for driver in storm(seed):
        rows = rows_of.look(list(driver.loop.state.sequences.values()))
        now = Snapshot({"now_s": driver.now, "requests": {"running": len(driver.loop.state.running)}}, rows)
        message = whole(now) if last is None else change(last, now)
        seen = apply(seen, json.loads(encode(message).removeprefix(b"data: ")))
        assert seen == now
        last = now


def test_an_unchanged_row_is_not_sent_again() -> None:
    one, two = row(1), row(2, "running")
    grown = two._replace(tokens=5, blocks=2)
    message = change(
        Snapshot({"a": 1, "b": [2]}, {1: one, 2: two, 3: row(3)}), Snapshot({"a": 1, "b": [3]}, {1: one, 2: grown})
    )
    assert message == {"type": "change", "head": {"b": [3]}, "rows": [], "grown": [(2, 5, 2)], "gone": [3]}


def test_a_snapshot_has_no_text_of_requests() -> None:
    """Rows have numbers, states and times alone: no prompt, no output, no name of a client or a request."""
    driver = Driver(make_loop())
    driver.submit([11, 12, 13], max_tokens=2)
    (sequence,) = driver.loop.state.sequences.values()
    sequence.request = replace(sequence.request, request_id="secret", client="alice", session="diary")
    rows = SequenceRows().look([sequence])
    text = json.dumps(whole(snapshot_of(LiveView(0.0, rows), EngineStats(), {}, {"service": "server"})))
    assert not any(word in text for word in ("secret", "alice", "diary", "[11"))


def test_the_documentation_names_all_members() -> None:
    """Of rows, heads and messages, in the part of docs/api.md about the feed."""
    text = (Path(floodplain.__file__).parent.parent / "docs/api.md").read_text().partition("## The live feed")[2]
    documented = set(re.findall(r"`([a-z_0-9]+)`", text))
    facts = {"service": "server", "version": "", "model": "", "can_burst": False}
    head = snapshot_of(LiveView(0.0, {}), EngineStats(), Latencies().summary(), facts).head
    members = {*Row._fields, *head, *head["requests"], *head["memory"], *head["latency"]}
    assert members - documented == set()
    assert {kind.value for kind in EventKind} - documented == set()
