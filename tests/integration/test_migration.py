"""Running requests move between two instances in one process: right tokens, no lost block, whatever fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from floodplain.cluster.bulk.kv_copies import Puller, RequestCopy
from floodplain.cluster.bulk.wire import compute_digest
from floodplain.cluster.instance.instance import Replica
from floodplain.cluster.instance.session import Session
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.migration.movable import Movable, open_movable
from floodplain.cluster.migration.table import MigrationState
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.state.request_table import Entry
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Welcome, pack, read_router_message
from floodplain.core.blocks import BlockState
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.web.address import bind
from tests.fakes.slots import FakeSlots
from tests.support import router_process
from tests.support.cluster_peers import keep_pace, until
from tests.support.loops import make_request
from tests.support.waiting import HANG_S

# -- two instances whose requests can move, and their router, in one process -------------------------------------------


OUTSIDE = "outside-secret"


@dataclass
class Moving:
    """A router and two instances, ``members`` by epoch, and the tasks that run them."""

    router: Router
    sock: Any
    members: dict[int, Replica] = field(default_factory=dict)
    lives: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def migration_controller(self) -> MigrationController:
        assert self.router.migration_controller is not None
        return self.router.migration_controller

    async def join(self, member: Replica) -> None:
        keep_pace(member.engine)
        await member.start()
        reader, writer = await asyncio.open_connection(*self.sock.getsockname()[:2])
        link = FrameLink(reader, writer)
        link.send(pack(member.hello(OUTSIDE)))
        frame = await link.read()
        assert frame is not None
        welcome = read_router_message(frame[0])
        assert isinstance(welcome, Welcome)
        self.members[welcome.epoch] = member
        self.lives[welcome.epoch] = asyncio.create_task(self._live(member, link, welcome))

    async def _live(self, member: Replica, link: FrameLink, welcome: Welcome) -> None:
        try:
            await Session(link, welcome, member.engine, member.open_role).run(asyncio.Event(), 1.0)
        finally:
            await link.close()

    def ask(self, prompt: tuple[int, ...], **params: Any) -> tuple[Entry, Caller]:
        request = make_request("r", prompt, asyncio.get_running_loop().time(), ignore_eos=True)
        request = replace(request, params=replace(request.params, **params))
        caller = Caller(ByteTokenizer(256), request)
        return self.router.requests.submit(request, caller), caller

    async def tokens(self, caller: Caller) -> list[int]:
        tokens: list[int] = []
        while True:
            delta = await caller.deltas.get()
            if isinstance(delta, BaseException):
                raise delta
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens

    async def started(self, entry: Entry, num_tokens: int = 5) -> tuple[int, int]:
        """Return the epochs of its instance and of the other one, once it has this many tokens."""
        await until(lambda: len(entry.tokens) >= num_tokens)
        (other,) = (epoch for epoch in self.members if epoch != entry.epoch)
        assert entry.epoch is not None
        return entry.epoch, other

    async def ended(self) -> None:
        await until(lambda: not len(self.migration_controller.migrations))

    def results(self) -> dict[str, int]:
        return dict(self.migration_controller.counts.num_ended)

    async def check_at_rest(self) -> None:
        """No block of any instance is held, owned or reserved."""
        for member in self.members.values():
            while not await self._is_idle(member):
                await asyncio.sleep(0.001)

    async def _is_idle(self, member: Replica) -> bool:
        pause = await member.engine.pause()
        try:
            return await pause.run(_is_at_rest)
        finally:
            pause.release()


def _is_at_rest(engine: Engine) -> bool:
    engine.loop.check_integrity()
    counts = engine.loop.state.ledger.count_states()
    return not (counts[BlockState.OWNED] or counts[BlockState.LOADING] or engine.loop.state.awaits_blocks)


@asynccontextmanager
async def moving(config: EngineConfig) -> AsyncIterator[Moving]:
    """Yield two instances behind a router; a time limit keeps a bug from hanging the suite."""
    sock = bind("127.0.0.1", 0)
    router = Router(60.0, {OUTSIDE: None}, FakeSlots(), lambda _: None, migrates=True)
    some = Moving(router, sock)
    async with asyncio.timeout(HANG_S):
        await router.start(sock)
        members = [open_movable(config, "127.0.0.1") for _ in range(2)]
        try:
            facts = members[0].hello(OUTSIDE).facts
            router.table.roster.first_facts = facts  # else only the router's own instances may join first
            for member in members:
                await some.join(member)
            yield some
        finally:
            await router.close()
            for life in some.lives.values():
                life.cancel()
            await asyncio.gather(*some.lives.values(), return_exceptions=True)
            for member in members:
                await member.close()
            sock.close()


# -- how they move -----------------------------------------------------------------------------------------------------


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


def states_of(some: Moving) -> list[MigrationState]:
    return [one.state for one in some.migration_controller.migrations]


class Barrier:
    """Holds an instance's chunks while a migration is in ``state``, until it is opened."""

    def __init__(self, some: Moving, epoch: int, state: MigrationState) -> None:
        self.opened, self.num_held = threading.Event(), 0
        self._some, self._state = some, state
        movable = some.members[epoch].shared
        assert isinstance(movable, Movable)
        movable.bulk._gate = self._hold

    def _hold(self) -> None:
        if self._state in states_of(self._some):
            self.num_held += 1
            assert self.opened.wait(HANG_S)


async def test_requests_move_in_mid_stream_with_the_tokens_of_one_engine() -> None:
    async with moving(CONFIG) as some:
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


async def test_a_damaged_chunk_leaves_the_request_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request paused at the end of a copied block has no chunk left to damage, so it moves."""
    damaged: list[MigrationState] = []
    async with moving(CONFIG) as some:
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


async def test_a_partly_filled_block_that_is_not_copied_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Puller.copy
    async with moving(CONFIG) as some:

        def skip_last(self: Puller, one: RequestCopy, write: Any) -> bool:
            if MigrationState.FINISHING in states_of(some):
                one = replace(one, sources=one.sources[:-1], targets=one.targets[:-1])
            return real(self, one, write)

        monkeypatch.setattr(Puller, "copy", skip_last)
        entry, caller = some.ask(PROMPT, max_tokens=NUM_TOKENS)
        some.migration_controller.move_one(*await some.started(entry, 8))
        assert await some.tokens(caller) != expected()
        assert some.results() == {"moved": 1}


@pytest.mark.parametrize("ends", ["source", "target", "request"])
@pytest.mark.parametrize("state", [MigrationState.COPYING, MigrationState.FINISHING])
async def test_the_end_of_either_life_costs_no_token_and_an_abort_no_block(ends: str, state: MigrationState) -> None:
    async with moving(CONFIG) as some:
        entry, caller = some.ask(PROMPT, max_tokens=400 if ends == "request" else NUM_TOKENS)
        source, target = await some.started(entry)
        barrier = Barrier(some, source, state)
        some.migration_controller.move_one(source, target)
        await until(lambda: barrier.num_held)
        if ends == "request":
            some.router.requests.drop(entry)
            assert not len(some.migration_controller.migrations) and not len(some.router.table)
        else:
            dead = source if ends == "source" else target
            some.lives[dead].cancel()
            await until(lambda: some.router.table.roster.get(dead) is None)
        barrier.opened.set()
        assert ends == "request" or await some.tokens(caller) == expected()
        await some.ended()
        await some.check_at_rest()


async def test_an_impossible_move_is_refused_in_one_line() -> None:
    async with moving(CONFIG) as some:
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


async def test_requests_move_by_themselves_from_a_full_instance_to_an_empty_one() -> None:
    async with moving(SMALL) as some:
        full, empty = (some.router.table.roster.expect(epoch) for epoch in some.members)
        empty.is_leaving, empty.can_move = True, False
        asked = [some.ask(PROMPT, max_tokens=NUM_TOKENS) for _ in range(5)]
        empty.is_leaving = False
        for entry, _ in asked:
            await until(lambda entry=entry: len(entry.tokens) > 5)
        assert {entry.epoch for entry, _ in asked} == {full.epoch}
        empty.can_move = True  # not before: the router looks by itself, too, whenever a beat is due
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
