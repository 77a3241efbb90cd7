"""Swap space for requests with block tables in several groups of layers: what is restored is what was saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from floodplain.core.cache_groups import CacheGroup, CacheKind, count_blocks
from floodplain.core.plan import Reason, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import SlotLedger, Tier
from floodplain.plugins.vllm.books import SwapBooks
from floodplain.plugins.vllm.tracked import TrackedRequest
from tests.support.controls import Controls, Fault
from tests.support.vllm_books import Block, Pool

NULL = Block(-1, is_null=True)
NUM_SLOTS, NUM_BLOCKS, WINDOW = 24, 60, 6
FULL, STATE = CacheGroup(4), CacheGroup(64, CacheKind.STATE, 1)
WINDOWED = CacheGroup(2, CacheKind.WINDOW, -(-(WINDOW - 1) // 2) + 1)
MODELS = [
    (FULL, WINDOWED),
    (WINDOWED,),
    (WINDOWED, FULL, FULL, WINDOWED),
    (FULL, STATE),
    (STATE, CacheGroup(8), FULL, CacheGroup(8, CacheKind.STATE, 2), WINDOWED),
]


@dataclass(eq=False)
class Live:
    """A request; each block of its tables has (request, group, what it holds)."""

    tracked: TrackedRequest
    number: int
    num_tokens: int = 0
    tables: list[list[Block]] = field(default_factory=list)


def wanted(number: int, group: int, kind: CacheGroup, place: int, num_tokens: int) -> list[Any]:
    """Return the content of a block after ``num_tokens``: the tokens in it, or the state after all of them."""
    if kind.kind is CacheKind.STATE:
        return [(number, group, "state", num_tokens)]
    end = min(num_tokens, (place + 1) * kind.block_tokens)
    return [(number, group, token) for token in range(place * kind.block_tokens, end)]


def first_place(kind: CacheGroup, num_tokens: int) -> int:
    """Return the first place of a table that vLLM keeps for the token behind ``num_tokens``."""
    if kind.kind is CacheKind.STATE:
        return (num_tokens - 1) // kind.block_tokens
    return max(0, num_tokens - WINDOW + 1) // kind.block_tokens if kind.kind is CacheKind.WINDOW else 0


class World:
    """A pool, requests and copies, with vLLM's tables: null blocks where a window or a state has moved on."""

    def __init__(self, groups: tuple[CacheGroup, ...]) -> None:
        self.groups, self.pool = groups, Pool(NUM_BLOCKS)
        self.books = SwapBooks([SlotLedger(Tier.HOST, NUM_SLOTS)], groups)
        self.books.bind(self.pool)
        self.slots: dict[int, list[Any]] = {}
        self.flights: list[tuple[Any, list[Any]]] = []
        self.on: list[Live] = []
        self.off: list[Live] = []
        self.num_restored = self.num_arrived = 0

    def arrive(self) -> None:
        request = cast(Any, type("R", (), {"priority": 0, "num_tokens": 1, "request_id": str(self.num_arrived)}))
        one = TrackedRequest(SeqId(self.num_arrived), request, 0.0, float(self.num_arrived))
        self.off.append(Live(one, self.num_arrived))
        self.num_arrived += 1

    def compute(self, one: Live, num_tokens: int) -> None:
        """Compute the next tokens; then windows and states move on."""
        end = one.num_tokens + num_tokens
        if sum(-(-end // kind.block_tokens) for kind in self.groups) > len(self.pool.free):
            return
        for number, (kind, table) in enumerate(zip(self.groups, one.tables, strict=True)):
            table += self.pool.give(-(-end // kind.block_tokens) - len(table))
            for place in range(first_place(kind, one.num_tokens or 1), len(table)):
                table[place].content = wanted(one.number, number, kind, place, end)
            for place in range(first_place(kind, end)):
                if not table[place].is_null:
                    self.pool.free_blocks([table[place]])
                    table[place] = NULL
        one.num_tokens = end
        held = sum(not block.is_null for table in one.tables for block in table)
        assert held <= count_blocks(self.groups, end), "no more than the policies count"

    def preempt(self, one: Live, *, keeps: bool) -> None:
        self.on.remove(one)
        kept = keeps and self.books.swap_out(one.tracked, one.tables, one.num_tokens, Reason.SLICE_ENDED)
        if not kept:
            self.books.forget(one.tracked)
        self.launch()
        for table in one.tables:
            self.pool.free_blocks([block for block in reversed(table) if not block.is_null])
        one.tables = []
        self.off.append(one)

    def resume(self, one: Live, num_local: int = 0) -> None:
        """Restore a request; its first ``num_local`` tokens are there already, in blocks that others shared with it."""
        num_tokens = self.books.count_restorable(one.tracked)
        assert num_tokens in (0, one.num_tokens) or all(kind.kind is CacheKind.FULL for kind in self.groups)
        places = [(first_place(kind, num_tokens), -(-num_tokens // kind.block_tokens)) for kind in self.groups]
        if sum(end - first for first, end in places) > len(self.pool.free):
            return
        self.off.remove(one)
        one.num_tokens = num_tokens
        one.tables = [[NULL] * first + self.pool.give(end - first) if num_tokens else [] for first, end in places]
        num_local = max(0, min(num_local, (num_tokens - 1) // 8 * 8))
        for number, (kind, table) in enumerate(zip(self.groups, one.tables, strict=True)):
            for place in range(first_place(kind, num_tokens or 1), num_local // kind.block_tokens):
                table[place].content = wanted(one.number, number, kind, place, num_local)
        if num_tokens:
            self.books.fetch(one.tracked, one.tables, num_local, num_tokens)
            [transfer] = self.books.take_due()
            assert num_local or len(transfer.blocks) == self.books.count_reads(one.tracked, 0, num_tokens)
            for block, location in zip(transfer.blocks, transfer.locations, strict=True):
                self.pool.blocks[block].content = self.slots[location.slot]
            self.books.settle(transfer.transfer_id, frozenset())
            self.num_restored += 1
            self.expect_all_there(one)
        self.books.note_start(one.tracked)
        self.on.append(one)

    def expect_all_there(self, one: Live) -> None:
        for number, (kind, table) in enumerate(zip(self.groups, one.tables, strict=True)):
            for place in range(first_place(kind, one.num_tokens), len(table)):
                content = wanted(one.number, number, kind, place, one.num_tokens)
                assert table[place].content[: len(content)] == content, "and maybe tokens that it had before"

    def launch(self) -> None:
        for transfer in self.books.take_due():
            self.flights.append((transfer, [self.pool.blocks[block].content for block in transfer.blocks]))

    def settle(self, index: int, *, loses: bool) -> None:
        """End a copy out, which may lose its first block; blocks may have been written since it began."""
        if not self.flights:
            return
        transfer, seen = self.flights.pop(index % len(self.flights))
        assert transfer.kind is not TransferKind.SWAP_IN
        for place, (block, location) in enumerate(zip(transfer.blocks, transfer.locations, strict=True)):
            content = self.pool.blocks[block].content
            assert content[: len(seen[place])] == seen[place] or "state" in str(content), "its block was not reused"
            self.slots[location.slot] = seen[place]
        self.books.settle(transfer.transfer_id, frozenset({0} if loses else ()))

    def end(self) -> None:
        while self.flights:
            self.settle(0, loses=False)
        for one in [*self.on]:
            self.preempt(one, keeps=False)
        for one in self.off:
            self.books.forget(one.tracked)
        assert len(self.pool.free) == NUM_BLOCKS and self.books.backups.is_at_rest


def walk(groups: tuple[CacheGroup, ...], seed: int, num_steps: int = 150) -> World:
    world, rng = World(groups), Random(seed)
    for _ in range(4):
        world.arrive()
    for _ in range(num_steps):
        event = rng.choice(["compute", "compute", "back up", "preempt", "resume", "resume", "settle", "settle"])
        some = rng.choice(world.on) if world.on else None
        if event == "resume" and world.off:
            world.resume(rng.choice(world.off), rng.choice([0, 8, 16, 32]))
        elif event == "settle":
            world.settle(rng.randrange(9), loses=rng.random() < 0.1)
        elif some and event == "compute":
            world.compute(some, rng.randrange(1, 4) if some.num_tokens < 40 else 1)
        elif some and event == "back up":
            world.books.back_up(some.tracked, some.tables, some.num_tokens, rng.randrange(1, 4), Tier.HOST)
            world.launch()
        elif some and event == "preempt" and some.num_tokens:
            world.preempt(some, keeps=rng.random() < 0.9)
        if some and some.num_tokens > 55 and some in world.on:
            world.preempt(some, keeps=False)
            world.off.remove(some)
            world.arrive()
    num_restored = world.num_restored
    world.end()
    world.num_restored = num_restored
    return world


@pytest.mark.parametrize("groups", MODELS, ids=lambda groups: " ".join(group.kind.value for group in groups))
def test_what_is_restored_is_what_was_saved(groups: tuple[CacheGroup, ...]) -> None:
    assert sum(walk(groups, seed).num_restored for seed in range(12)) > 40


CONTROLS = Controls()
CONTROLS.add("leaves_a_window_out", SwapBooks, "_rest_of", lambda rest, *about: rest(*about)[1:])
CONTROLS.add(
    "takes_a_state_a_token_late", SwapBooks, "count_restorable", lambda count, *about: max(0, count(*about[:2]) - 1)
)
CONTROLS.add("keeps_what_is_outdated", SwapBooks, "note_start", lambda _, books, one: setattr(one, "is_away", False))
CONTROLS.add("mixes_groups_up", SwapBooks, "_full_blocks", lambda full, *about: full(*about)[::-1])


@pytest.mark.parametrize("fault", CONTROLS)
def test_the_walk_notices_books_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for groups in MODELS:
            for seed in range(12):
                walk(groups, seed)
