"""Views of vLLM that are kept from step to step equal views made anew, after any events."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.request import SeqId
from floodplain.plugins.vllm import kept_rows
from floodplain.plugins.vllm.exclusive import ExclusiveCounts
from floodplain.plugins.vllm.kept_rows import KeptRows
from floodplain.plugins.vllm.prefix_index import PrefixIndex
from floodplain.plugins.vllm.saved_prefixes import SavedPrefixes
from floodplain.plugins.vllm.tracked import SPARE_ENTRIES, RequestRoster, TrackedRequest
from floodplain.plugins.vllm.turn_queue import TurnQueue
from tests.support.examples import examples
from tests.support.vllm_books import BLOCK_TOKENS, Block, Pool
from tests.support.vllm_engine import NUM_BLOCKS, WINDOW, FakeEngine, as_of

EVENTS = (
    "arrive", "admit", "admit", "run", "run", "back_up", "leave", "leave", "get_late_token", "settle", "settle", "end",
    "look", "look", "look", "speculate", "speculate", "verify",
)  # fmt: skip
STORY = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 63)), max_size=60)


def expect_same(engine: FakeEngine) -> None:
    """Compare the kept view with rows that are made anew."""
    running, waiting, swapped = engine.plain_rows()
    view = engine.look()
    assert as_of(view.running, engine.step) == as_of(running, engine.step)
    assert as_of(view.swapped, engine.step) == as_of(swapped, engine.step)
    assert as_of(view.waiting, engine.step) == as_of(waiting[:WINDOW], engine.step)
    assert view.num_waiting == len(waiting)
    for one in engine.controller.roster:
        num_copied = max(len(one.backups) * BLOCK_TOKENS, one.num_kept_tokens)
        assert num_copied <= one.request.num_tokens, "of tokens that stay"


def play(engine: FakeEngine, story: list[tuple[str, int]]) -> None:
    for event, index in story:
        if event == "look":
            expect_same(engine)
        else:
            getattr(engine, event)(index)
    expect_same(engine)


@given(story=STORY)
@settings(max_examples=examples(150), deadline=None)
def test_a_view_that_was_kept_equals_one_made_anew(story: list[tuple[str, int]]) -> None:
    play(FakeEngine(), story)


def walk(seed: int, num_events: int = 600, *, pins: bool = False) -> FakeEngine:
    rng, engine = Random(seed), FakeEngine(pins=pins)
    events = [event for event in EVENTS if event != "speculate" or not pins]  # which are refused together
    play(engine, [(rng.choice(events), rng.randrange(64)) for _ in range(num_events)])
    return engine


@pytest.mark.parametrize("seed", range(examples(8)))
def test_a_long_walk_with_views_in_between(seed: int) -> None:
    walk(seed)


@pytest.mark.parametrize("seed", range(examples(8)))
def test_a_long_walk_where_kv_of_ended_requests_is_kept(seed: int) -> None:
    assert walk(seed, pins=True).num_adopted > 0


def test_the_law_notices_if_changes_in_swap_space_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedPrefixes, "refresh", lambda _: set())
    with pytest.raises(AssertionError):
        for seed in range(60):
            walk(seed, pins=True)


def test_a_resumed_request_that_is_seen_before_its_first_step_has_entered() -> None:
    """A case that random walks rarely reach."""
    engine = FakeEngine()
    play(engine, [("arrive", 0), ("look", 0), ("admit", 0), *[("run", 20)] * 3, ("leave", 1), ("settle", 1)])
    play(engine, [("admit", 0), ("settle", 1)])
    (row,) = engine.look().running
    assert row.is_decoding and row.entered_step == 0
    play(engine, [("run", 20)])


def does_nothing(*_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ExclusiveCounts, "note"),
        (ExclusiveCounts, "_settle"),
        (PrefixIndex, "note_held"),
        (PrefixIndex, "note_evicted"),
        (PrefixIndex, "note_cached"),
    ],
)
def test_the_law_notices_if_changes_are_not_reported(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, does_nothing)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        for seed in range(20):
            walk(seed)


@pytest.mark.parametrize(("owner", "name"), [(ExclusiveCounts, "take_recounted"), (PrefixIndex, "take_forgotten")])
def test_the_law_notices_if_rows_that_changed_are_not_named(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda _: set())
    with pytest.raises(AssertionError):
        for seed in range(20):
            walk(seed)


def test_the_law_notices_rows_that_are_kept_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "_lead", lambda *_: ANY)
    with pytest.raises(AssertionError):
        walk(0)


def test_the_law_notices_rows_of_absent_requests_that_are_kept_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = KeptRows.absent

    def keep(rows: KeptRows, one: Any, make: Any) -> Any:
        kept = rows._absent.get(one.seq_id)
        return absent(rows, one, make) if kept is None else kept[1]

    monkeypatch.setattr(KeptRows, "absent", keep)
    with pytest.raises(AssertionError):
        walk(0)


def test_the_law_notices_copies_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrackedRequest, "num_unverified_tokens", 0)
    with pytest.raises(AssertionError, match="of tokens that stay"):
        for seed in range(20):
            walk(seed)


def test_a_row_is_not_kept_while_drafts_are_outstanding() -> None:
    """Where as many drafts are outstanding as there were tokens since, a row seems to be valid."""
    engine = FakeEngine()
    play(engine, [("arrive", 0), ("look", 0), ("admit", 0), *[("run", 20)] * 3, ("look", 0)])
    engine.step += 1  # its request pauses
    play(engine, [("speculate", 1)])


def test_a_row_made_while_drafts_were_outstanding_is_not_kept() -> None:
    """If one of its drafts is right and its request then pauses, the row seems to be valid."""
    engine = FakeEngine()
    play(engine, [("arrive", 0), ("look", 0), ("admit", 0), ("run", 4)])
    play(engine, [("speculate", 3), ("verify", 0), ("speculate", 1)])
    engine.verify(1)
    engine.step += 1  # its request pauses
    expect_same(engine)


def test_the_law_notices_a_queue_that_forgets_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    take = TurnQueue.take_changed
    monkeypatch.setattr(
        TurnQueue, "take_changed", lambda queue: {key: one for key, one in take(queue).items() if one is not None}
    )
    with pytest.raises((AssertionError, KeyError)):
        walk(0)


# -- exclusive blocks alone --------------------------------------------------------------------------------------------


class NotingPool(Pool):
    """A pool that reports its changes to the counts."""

    def __init__(self, counts: ExclusiveCounts) -> None:
        super().__init__(NUM_BLOCKS)
        self._counts = counts

    def touch(self, blocks: Any) -> None:
        super().touch(blocks)
        self._counts.note(blocks)

    def free_blocks(self, ordered_blocks: Any) -> None:
        super().free_blocks(ordered_blocks)
        self._counts.note(ordered_blocks)


@given(
    events=st.lists(st.tuples(st.sampled_from(["allocate", "share", "free", "copy", "count"]), st.integers(0, 99))),
)
def test_kept_counts_equal_recounted_ones(events: list[tuple[str, int]]) -> None:
    counts = ExclusiveCounts()
    pool, tables, copies = NotingPool(counts), dict[SeqId, list[Block]](), list[list[Block]]()
    for number, (event, index) in enumerate(events):
        there = sorted(tables)
        some = tables[there[index % len(there)]] if there else []
        if event == "allocate":  # to an existing table, or to a new one
            more = pool.give(min(index % 4, len(pool.free)))
            tables.setdefault(there[index % len(there)] if there and index % 3 else SeqId(number), []).extend(more)
        elif event == "share":
            shared = some[: index % 5]
            pool.touch(shared)
            tables[SeqId(number)] = list(shared)
        elif event == "free" and there:
            seq_id = there[index % len(there)]
            pool.free_blocks(tables.pop(seq_id)[::-1])
            counts.keep_only(set(tables))
        elif event == "copy":  # a copy begins to hold blocks, or ends
            if copies and index % 2:
                pool.free_blocks(copies.pop())
            else:
                copies.append(some[: index % 4])
                pool.touch(copies[-1])
        for seq_id, table in tables.items() if event == "count" else ():
            assert counts.count(seq_id, table) == sum(block.ref_cnt == 1 for block in table)
    for seq_id, table in tables.items():
        assert counts.count(seq_id, table) == sum(block.ref_cnt == 1 for block in table)


# -- arrivals ----------------------------------------------------------------------------------------------------------


@given(events=st.lists(st.tuples(st.sampled_from(["arrive", "generate", "depart"]), st.integers(0, 20))))
def test_a_newcomer_begins_at_the_least_work_of_live_requests(events: list[tuple[str, int]]) -> None:
    engine_like: dict[str, Any] = {}
    roster = RequestRoster()
    for number, (event, index) in enumerate(events):
        names = sorted(engine_like)
        if event == "arrive":
            expected = min((one.account.work for one in roster), default=0.0)
            request = engine_like[f"request-{number}"] = _Generating(f"request-{number}", index % 5 - 2)
            assert roster.arrive(request, 0.0).account.credit == expected  # type: ignore[arg-type]
        elif names and event == "generate":
            engine_like[names[index % len(names)]].num_output_tokens += index
        elif names:
            name = names[index % len(names)]
            del engine_like[name]
            roster.depart(name)


def test_requests_that_ended_are_not_kept_for_one_that_stays() -> None:
    roster = RequestRoster()
    roster.arrive(_Generating("stays", 0), 0.0)  # type: ignore[arg-type]
    for number in range(1000):
        roster.arrive(_Generating(f"request-{number}", 0), 0.0).request.num_output_tokens = 5  # type: ignore[arg-type,misc]
        roster.depart(f"request-{number}")
        roster.take_departed()
        assert len(roster._by_work) <= 2 * len(roster.by_id) + SPARE_ENTRIES + 1


class _Generating:
    def __init__(self, request_id: str, priority: int) -> None:
        self.request_id, self.priority, self.num_output_tokens, self.arrival_time = request_id, priority, 0, 0.0
