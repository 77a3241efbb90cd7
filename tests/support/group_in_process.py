"""A router and instances that can drop layers, in one process: real engines and sockets, with accessible memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from floodplain.cluster.groups import membership
from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.groups.droppable import open_droppable
from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.instance.instance import Dialer, Member, Replica
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.core.blocks import BlockLedger
from floodplain.core.groups import GroupState
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.config import EngineConfig
from floodplain.model.tokenizer import ByteTokenizer
from floodplain.model.weights.open_model import open_model
from floodplain.web.address import bind
from tests.fakes.slots import FakeSlots
from tests.support.cluster_peers import keep_pace, until

TOKEN = "secret"
PENALTIES: dict[str, float] = {"repetition_penalty": 1.2, "frequency_penalty": 0.2}
"""Each token of the requests depends on all before it: the stage that samples must know them."""
HANG_S = 100.0
"""Time limit of a hang: a loaded machine takes a minute for five seconds of work."""


def ledger_off_the_event_loop(*args: Any, **options: Any) -> BlockLedger:
    """Return a ledger; fails on the event loop, where creating a large ledger delays beats."""
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
    return BlockLedger(*args, **options)


class Ring:
    """A router of instances that serve; its requests, and their tokens."""

    def __init__(self, router: Router, instances: Sequence[Replica]) -> None:
        self.router, self._instances = router, instances
        membership.BlockLedger = ledger_off_the_event_loop  # type: ignore[assignment, misc]
        self._streams: list[asyncio.Task[list[int]]] = []
        self.counts: list[int] = []
        self.tokens: dict[int, list[int]] = {}

    @property
    def group_controller(self) -> GroupController:
        assert self.router.group_controller is not None
        return self.router.group_controller

    @property
    def members(self) -> list[GroupMember]:
        """Members, in no particular order."""
        return [one.shared for one in self._instances if isinstance(one.shared, GroupMember)]

    def ask(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        for prompt in prompts:
            self.counts.append(0)
            self._streams.append(asyncio.create_task(self._stream(len(self.counts) - 1, prompt, num_tokens)))

    async def _stream(self, number: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Read a request's tokens; if this task is cancelled, the router drops the request."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **PENALTIES)
        request = Request(
            request_id=f"r{number}", prompt_token_ids=tuple(prompt), params=params, arrival_s=time.monotonic()
        )
        caller, tokens = Caller(ByteTokenizer(256), request), list[int]()
        entry = self.router.requests.submit(request, caller)
        self.tokens[number] = tokens
        try:
            while len(tokens) < num_tokens:
                delta = await caller.deltas.get()
                if isinstance(delta, BaseException):
                    raise delta
                tokens += delta.token_ids
                self.counts[number] = len(tokens)
        except asyncio.CancelledError:
            self.router.requests.drop(entry)
            raise
        return tokens

    async def until(self, condition: Callable[[], object]) -> None:
        """Return when the condition holds; fails if a stream has failed."""
        while not condition():
            for stream in self._streams:
                assert not stream.done() or stream.exception() is None, stream.exception()
            await asyncio.sleep(0.002)

    async def change(self, number: int, state: GroupState) -> None:
        """Return when the only changing group has entered a state; fails if the group ends before."""
        entered, before = self.group_controller.counts.num_entered, self.group_controller.counts.num_entered[state]
        await self.until(lambda: entered[state] > before or self.group_controller.groups.get(number) is None)
        assert entered[state] > before, self.group_controller.counts.problems

    async def results(self) -> list[list[int]]:
        return list(await asyncio.gather(*self._streams))

    async def first_results(self, num_tokens: int) -> list[list[int]]:
        """The first ``num_tokens`` tokens of each request; requests that have more to come are aborted."""
        await self.until(lambda: min(self.counts) >= num_tokens)
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        results = [self.tokens[number][:num_tokens] for number in range(len(self.counts))]
        self.forget()
        await self.until(lambda: not any(member.engine.engine.has_unfinished for member in self.members))
        return results

    def forget(self) -> None:
        """Drop the records of all requests."""
        self._streams, self.counts, self.tokens = [], [], {}


@asynccontextmanager
async def dialled(router: Router, members: Iterable[tuple[Member, str]]) -> AsyncIterator[None]:
    """Have members, each with its token, dial a router; a time limit keeps a bug from hanging the suite."""
    async with asyncio.timeout(HANG_S):
        sock = bind("127.0.0.1", 0)
        await router.start(sock)
        port = sock.getsockname()[1]
        dialers = [Dialer(one, "127.0.0.1", port, token, 1.0) for one, token in members]
        lives = [asyncio.create_task(dialer.run()) for dialer in dialers]
        try:
            yield
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
            await router.close()
            sock.close()


@asynccontextmanager
async def ring(
    config: EngineConfig,
    num_instances: int,
    folder: Path,
    silence_s: float = 60.0,
    stall_timeout_s: float | None = None,
) -> AsyncIterator[Ring]:
    """Yield instances that have joined, under epochs from 1."""
    shape = open_model(config.model).config.shape
    router = Router(silence_s, {TOKEN: 0}, FakeSlots(), lambda _: None, shape=shape, stall_timeout_s=stall_timeout_s)
    instances = [open_droppable(config, folder, "127.0.0.1") for _ in range(num_instances)]
    for one in instances:
        keep_pace(one.engine)
    async with dialled(router, [(one, TOKEN) for one in instances]):
        await until(lambda: len(router.table.roster) == num_instances)
        yield Ring(router, instances)
