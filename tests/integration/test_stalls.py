"""Engines blocked while their event loops send heartbeats: their requests go on elsewhere with the same tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from floodplain.cluster.groups.controller import STEP_TIMEOUT_S
from floodplain.cluster.groups.member import GroupMember
from floodplain.cluster.groups.membership import Membership
from floodplain.cluster.instance.instance import Member, Replica
from floodplain.cluster.instance.stage_member import open_stage
from floodplain.cluster.router import router as routers
from floodplain.cluster.router.router import Router
from floodplain.core.groups import GroupState
from floodplain.engine import stage_build
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.runner import StageRunner
from floodplain.engine.shell import Engine
from floodplain.memory.group_memory import GroupMemory
from tests.fakes.slots import FakeSlots
from tests.support import router_process
from tests.support.cluster_peers import until
from tests.support.group_in_process import PENALTIES, Ring, dialled, ledger_off_the_event_loop, ring
from tests.support.waiting import HANG_S

MODEL, NUM_TOKENS = "dummy:tiny-deep", 24
FLAGS: dict[str, Any] = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 256}
CONFIG = EngineConfig(model=MODEL, **FLAGS)
PROMPTS = [[(3 + 7 * number + 5 * place) % 256 for place in range(20 + number)] for number in range(4)]
TIMEOUT_S = 2.0
"""Much longer than real steps, which take milliseconds."""


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send five heartbeats a second, although the timeout of silence is ``HANG_S``."""
    monkeypatch.setattr(routers, "BEATS_PER_TIMEOUT", 5 * HANG_S)


@cache
def expected() -> list[list[int]]:
    return router_process.one_engine(MODEL, PROMPTS, FLAGS, max_tokens=NUM_TOKENS, **PENALTIES)


class Block:
    """Holds each thread that calls ``pass_by`` while it is shut, until it is opened for good."""

    def __init__(self) -> None:
        self.is_shut, self.num_held = False, 0
        self._opened = threading.Event()

    def pass_by(self) -> None:
        if self.is_shut:
            self.num_held += 1
            assert self._opened.wait(HANG_S)

    def open(self) -> None:
        self.is_shut = False
        self._opened.set()


@contextmanager
def block(kind: type, name: str, is_bad: Callable[[Any], bool]) -> Iterator[Block]:
    """Put a block into a method of a class, for objects that are bad; it opens when the context ends."""
    old, one = getattr(kind, name), Block()

    def call(self: Any, *args: Any) -> Any:
        if is_bad(self):
            one.pass_by()
        return old(self, *args)

    setattr(kind, name, call)
    try:
        yield one
    finally:
        one.open()
        setattr(kind, name, old)


@asynccontextmanager
async def served(
    members: Sequence[Member], num_stages: int | None = None
) -> AsyncIterator[tuple[Ring, list[tuple[int, str]]]]:
    """(a router over members in this process, in slots from 0; lost slots with their reasons)."""
    slots = FakeSlots()
    tokens: dict[str, int | None] = {f"secret-{slot}": slot for slot in range(len(members))}
    router = Router(HANG_S, tokens, slots, lambda _: None, num_stages, stall_timeout_s=TIMEOUT_S)
    async with dialled(router, zip(members, tokens, strict=True)):
        yield Ring(router, ()), slots.lost


@pytest.mark.parametrize("where", ["step", "add"])
async def test_requests_of_a_blocked_engine_go_on_elsewhere_and_it_rejoins_later(where: str) -> None:
    """It is blocked within a step, or between two; while it is blocked, it does not join again."""
    members = [Replica(AsyncEngine.from_config(CONFIG)) for _ in range(2)]
    bad = members[1].engine.engine
    with block(Engine, where, lambda engine: engine is bad) as blocked:
        async with served(members) as (one, lost):
            roster = one.router.table.roster
            await until(lambda: len(roster) == 2)
            blocked.is_shut = True
            one.ask(PROMPTS, NUM_TOKENS)
            assert await one.results() == expected()
            assert (blocked.num_held, lost, one.router.num_ends) == (1, [(1, "stuck")], {"stuck": 1})
            assert [instance.slot for instance in roster] == [0]
            blocked.open()
            await until(lambda: len(roster) == 2)


async def test_blocked_stage_is_blamed_and_not_the_stages_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_build, "BlockLedger", ledger_off_the_event_loop)
    config = replace(CONFIG, swap="none", policy="fcfs")
    members = [open_stage(config, place, 2, "even", None) for place in range(2)]
    first = members[1].stage.parts.layers.start
    with block(StageRunner, "run", lambda runner: runner._model.held.start == first) as blocked:
        async with served(members, 2) as (one, lost):
            await until(lambda: one.router.is_ready)
            one.ask(PROMPTS, NUM_TOKENS)
            await one.until(lambda: min(one.counts) > 2)
            blocked.is_shut = True
            await one.until(lambda: lost)
            blocked.open()
            assert await one.results() == expected()  # by the next pipeline
            assert lost == [(1, "stuck"), (0, "pipeline")]


async def test_blocked_member_of_a_group_is_blamed_and_requests_go_on(folder: Path) -> None:
    with block(StageRunner, "run", lambda runner: runner._model.held.start > 0) as blocked:
        async with ring(CONFIG, 3, folder, HANG_S, TIMEOUT_S) as one:
            await one.change(one.group_controller.drop([1, 2]), GroupState.PIPELINED)
            one.ask(PROMPTS, NUM_TOKENS)
            ended, end = list[tuple[int, str]](), one.router._end
            one.router._end = lambda epoch, why: (ended.append((epoch, why)), end(epoch, why))[1]  # type: ignore[method-assign, func-returns-value]
            blocked.is_shut = True
            assert await one.results() == expected()
            assert ended[0] == (2, "stuck") and one.router.num_ends == {"stuck": 1, "group": 1}
            blocked.open()
            await one.until(lambda: len(one.router.table.roster) == 3)


CHANGES = {
    GroupState.DROPPING: (GroupMemory, "drop"),
    GroupState.EXCHANGING: (GroupMemory, "write"),
    GroupState.SETTLING: (GroupMemory, "settle"),
    GroupState.SHRINKING: (GroupMemory, "shrink"),
    GroupState.FILLING: (GroupMember, "fill"),
    GroupState.RETURNING: (Membership, "_unmap_unused"),
    GroupState.ADOPTING: (Membership, "_collect_one"),
    GroupState.CLOSING: (GroupMemory, "close_group"),
}
"""The method that a member runs on a thread in each state of a group."""


async def test_member_that_blocks_in_a_change_ends_its_group_and_no_request(
    folder: Path,
) -> None:
    num_tokens = 150
    tokens = router_process.one_engine(MODEL, PROMPTS, FLAGS, max_tokens=num_tokens, **PENALTIES)
    async with ring(CONFIG, 3, folder, HANG_S) as one:
        member = one.members[1]
        for state, (kind, name) in CHANGES.items():
            with block(kind, name, lambda work: getattr(work, "_member", work) in (member, member.memory)) as blocked:
                await break_change(one, state, blocked, num_tokens)
                assert await one.results() == tokens, state
                blocked.open()
                one.forget()
                await one.until(lambda: len(one.router.table.roster) == 3)


async def break_change(one: Ring, state: GroupState, blocked: Block, num_tokens: int) -> None:
    """Group all instances under requests; a member that blocks in ``state`` ends the group."""
    epochs = [instance.epoch for instance in one.router.table.roster]
    is_restore = list(CHANGES).index(state) > list(CHANGES).index(GroupState.SETTLING)
    if is_restore:
        number = one.group_controller.drop(epochs)
        await one.change(number, GroupState.PIPELINED)
    one.ask(PROMPTS, num_tokens)
    await one.until(lambda: min(one.counts) > 2)
    blocked.is_shut = True
    if is_restore:
        one.group_controller.restore(number)
    else:
        number = one.group_controller.drop(epochs)
    await one.until(lambda: blocked.num_held)
    one.group_controller.look(time.monotonic() + STEP_TIMEOUT_S + 1.0)
    assert one.group_controller.counts.problems[number] == f"nothing was done for {STEP_TIMEOUT_S:g} s: {state}"
