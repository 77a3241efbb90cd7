"""Running requests move between two instances in one process: right tokens, no lost block, whatever fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from floodplain.cluster.bulk.kv_copies import Puller, RequestCopy
from floodplain.cluster.bulk.wire import compute_digest
from floodplain.cluster.migration.movable import Movable
from floodplain.cluster.migration.table import MigrationState
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from tests.support import router_process
from tests.support.cluster_peers import until
from tests.support.moving import Moving, moving
from tests.support.waiting import HANG_S

MODEL = "dummy:tiny-deep"
CONFIG = EngineConfig(model=MODEL, dtype="float32", kv_memory=2**22, max_model_len=512)
SMALL = replace(CONFIG, kv_memory=2**20, max_model_len=256)
PROMPT = tuple(range(3, 74))
NUM_TOKENS = 72
SEEDED = {"temperature": 0.8, "seed": 11}


@cache
def expected(is_seeded: bool = False) -> list[int]:
    """Tokens of one engine."""
    flags = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 512}
    how = SEEDED if is_seeded else {}
    (tokens,) = router_process.one_engine(MODEL, [PROMPT], flags, max_tokens=NUM_TOKENS, **how)
    return tokens


def story(tell: Callable[[Moving], Awaitable[None]], config: EngineConfig = CONFIG) -> None:
    """Run ``tell`` with two instances."""

    async def run() -> None:
        async with moving(config) as some:
            await tell(some)

    asyncio.run(run())


def states_of(some: Moving) -> list[MigrationState]:
    return [one.state for one in some.migration_controller.migrations]


class Barrier:
    """Holds an instance's chunks while a migration is in ``state``, until it is opened."""

    def __init__(self, some: Moving, epoch: int, state: MigrationState) -> None:
        self.opened, self.num_held = threading.Event(), 0
        self._some, self._state = some, state
        movable = some.members[epoch].shared
        assert isinstance(movable, Movable)
        movable.bulk_gate = self._hold

    def _hold(self) -> None:
        if self._state in states_of(self._some):
            self.num_held += 1
            assert self.opened.wait(HANG_S)


def test_requests_move_in_mid_stream_with_the_tokens_of_one_engine() -> None:
    async def tell(some: Moving) -> None:
        for is_seeded in (False, True):
            entry, caller = some.ask(PROMPT, max_tokens=NUM_TOKENS, **(SEEDED if is_seeded else {}))
            for number in (5, 25, 45):  # there, back, and there again
                source, target = await some.started(entry, number)
                some.migration_controller.move_one(source, target)
                await some.ended()
                assert entry.epoch == target
            assert await some.tokens(caller) == expected(is_seeded)
        assert some.results() == {"moved": 6}
        counts = some.migration_controller.counts
        assert counts.num_tokens > 6 * len(PROMPT) and 0 < counts.downtime_s < HANG_S
        assert not some.router.requests.num_moved  # no request was recomputed
        await some.check_at_rest()

    story(tell)


def test_a_damaged_chunk_leaves_the_request_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request paused at the end of a copied block has no chunk left to damage, so it moves."""
    damaged: list[MigrationState] = []

    async def tell(some: Moving) -> None:
        entry, caller = some.ask(PROMPT, max_tokens=NUM_TOKENS)
        for number, wanted in ((5, MigrationState.COPYING), (25, MigrationState.FINISHING)):

            def damage(data: Any, wanted: MigrationState = wanted) -> int:
                is_hit = wanted in states_of(some)
                damaged.extend([wanted] * is_hit)
                return compute_digest(data) ^ is_hit

            monkeypatch.setattr("floodplain.cluster.bulk.server.compute_digest", damage)
            while wanted not in damaged:
                source, target = await some.started(entry, number)
                some.migration_controller.move_one(source, target)
                await some.ended()
            assert entry.epoch == source
        assert await some.tokens(caller) == expected()
        num_moved = some.results().get("moved", 0)
        assert some.results()["failed"] == 2 and entry.num_moves == num_moved <= 1
        await some.check_at_rest()

    story(tell)


def test_a_partly_filled_block_that_is_not_copied_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Puller.copy

    async def tell(some: Moving) -> None:
        def skip_last(self: Puller, one: RequestCopy, write: Any) -> bool:
            if MigrationState.FINISHING in states_of(some):
                one = replace(one, sources=one.sources[:-1], targets=one.targets[:-1])
            return real(self, one, write)

        monkeypatch.setattr(Puller, "copy", skip_last)
        entry, caller = some.ask(PROMPT, max_tokens=NUM_TOKENS)
        some.migration_controller.move_one(*await some.started(entry, 8))
        assert await some.tokens(caller) != expected()
        assert some.results() == {"moved": 1}

    story(tell)


@pytest.mark.parametrize("state", [MigrationState.COPYING, MigrationState.FINISHING])
def test_an_abort_while_kv_is_copied_frees_all_blocks(state: MigrationState) -> None:
    async def tell(some: Moving) -> None:
        entry, _ = some.ask(PROMPT, max_tokens=400)
        source, target = await some.started(entry)
        barrier = Barrier(some, source, state)
        some.migration_controller.move_one(source, target)
        await until(lambda: barrier.num_held)
        some.router.requests.drop(entry)
        barrier.opened.set()
        assert not len(some.migration_controller.migrations)
        assert len(some.router.table) == 0
        await some.check_at_rest()

    story(tell)


@pytest.mark.parametrize("dies", ["source", "target"])
@pytest.mark.parametrize("state", [MigrationState.COPYING, MigrationState.FINISHING])
def test_the_end_of_either_life_costs_no_token(dies: str, state: MigrationState) -> None:
    async def tell(some: Moving) -> None:
        entry, caller = some.ask(PROMPT, max_tokens=NUM_TOKENS)
        source, target = await some.started(entry)
        barrier = Barrier(some, source, state)
        some.migration_controller.move_one(source, target)
        await until(lambda: barrier.num_held)
        dead = source if dies == "source" else target
        some.lives[dead].cancel()
        await until(lambda: some.router.table.roster.get(dead) is None)
        barrier.opened.set()
        assert await some.tokens(caller) == expected()
        await some.ended()
        await some.check_at_rest()

    story(tell)


def test_an_impossible_move_is_refused_in_one_line() -> None:
    async def tell(some: Moving) -> None:
        first, second = some.members
        with pytest.raises(UserError, match="runs no request"):
            some.migration_controller.move_one(first, second)
        entry, caller = some.ask(PROMPT, max_tokens=30)
        source, target = await some.started(entry)
        with pytest.raises(UserError, match="has the request already"):
            some.migration_controller.move_one(source, source)
        some.router.table.roster.expect(target).can_move = False
        with pytest.raises(UserError, match="--relief migrate"):
            some.migration_controller.move_one(source, target)
        await some.tokens(caller)

    story(tell)


def test_requests_move_by_themselves_from_a_full_instance_to_an_empty_one() -> None:
    async def tell(some: Moving) -> None:
        full, empty = (some.router.table.roster.expect(epoch) for epoch in some.members)
        empty.is_leaving = True
        asked = [some.ask(PROMPT, max_tokens=NUM_TOKENS) for _ in range(5)]
        empty.is_leaving = False
        for entry, _ in asked:
            await until(lambda entry=entry: len(entry.tokens) > 5)
        assert {entry.epoch for entry, _ in asked} == {full.epoch}
        some.migration_controller.look(100.0)
        num_begun = len(some.migration_controller.migrations)
        assert 0 < num_begun < 5
        some.migration_controller.look(100.0)  # running migrations count at their target
        assert len(some.migration_controller.migrations) == num_begun
        await some.ended()
        assert sum(entry.epoch == empty.epoch for entry, _ in asked) == num_begun
        assert [await some.tokens(caller) for _, caller in asked] == [expected()] * 5
        assert some.results() == {"moved": num_begun}
        await some.check_at_rest()

    story(tell, SMALL)
