"""A router and two instances whose requests can move, in one process: real engines, sockets, and transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from floodplain.cluster.instance.instance import Replica
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.migration.movable import open_movable
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.state.request_table import Entry
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import Welcome, pack, read_router_message
from floodplain.core.blocks import BlockState
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.web.listen import bind
from tests.fakes.slots import FakeSlots
from tests.support.cluster_peers import keep_pace, until
from tests.support.loops import make_request
from tests.support.waiting import HANG_S

OUTSIDE = "outside-secret"


@dataclass
class Moving:
    """See the module.

    Attributes:
        router: The router.
        members: Instances by epoch.
        lives: The tasks that run them.
    """

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
            await member.live(link, welcome, asyncio.Event(), 1.0)
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
            router.table.first_facts = facts  # else only the router's own instances may join first
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
