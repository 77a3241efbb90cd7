"""Any message of an instance, in any state, ends at most its own connection; all others continue."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.router.listings import RouterWatch, list_parts
from floodplain.cluster.router.metrics import ClusterMetrics
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.router.router import Router
from floodplain.cluster.wire import messages
from floodplain.cluster.wire.group_messages import Answer, Copied, GroupDone, HandedOver, KvRow, Planned, Prepared
from floodplain.cluster.wire.messages import (
    Beat,
    Formed,
    Hello,
    KvHeld,
    KvPulled,
    Leaving,
    Refused,
    RequestStopped,
    StopRequest,
    TokenRow,
    Tokens,
    pack,
)
from floodplain.core import codec
from floodplain.core.errors import UserError
from floodplain.core.groups import GroupState
from floodplain.core.plan import TokenLogprobs
from floodplain.cost.model_shape import SHAPES
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.model.tokenizer import ByteTokenizer
from tests.fakes.slots import FakeSlots
from tests.support.examples import examples
from tests.support.loops import make_request
from tests.support.router_world import FACTS, NUM_LAYERS, Bot, World, settle, unpack

KINDS = ("plain", "drop", "migrate", "pipeline")
NUM_SLOTS, NUM_EVENTS = 3, 45
EVENTS = ["ask", "ask", "hang up", "order", "order", "answer", "answer", "answer", "step", "bad", "bad"]
JUNK = [-1, 0, 1, 2, 7, 2**31, 2**63, -(2**63), 2**64, 10**4000, float("nan"), float("inf"), -float("inf"), 1e300, 0.5,
        "", "x", "\x1b[2J\n", "\ud800", "y" * 70_000, "stop", "returned", None, True, False, [], {}, [0] * 300, [[]],
        {"a": 1}]  # fmt: skip


def templates(dice: Random, bot: Bot, epoch: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Return messages of every kind, with small numbers that may match existing ones."""
    number, ticket = dice.randint(1, 4), dice.choice([*bot.lengths, dice.randint(1, 30)])
    known = bot.lengths.get(ticket, (9, 9, None))[0]
    row = KvRow(ticket, known, known - 1, -(-(known - 1) // 4))
    blocks = tuple(range(row.num_blocks))
    where = dice.choice(list(Answer))
    return [
        (Hello("t0", FACTS), ()),
        (Tokens(epoch, (TokenRow(ticket, 65, dice.choice([None, "stop", "length"]), 0, None),)), ()),
        (Tokens(epoch, (TokenRow(ticket, None, None, 0, TokenLogprobs(-1.0, ((1, -1.0),))),)), ()),
        (Refused(epoch, ticket, dice.choice(["full", "stopping", "refused", "invalid"]), "m", None), ()),
        (Beat(epoch, EngineStats(num_blocks=5, kv_blocks={"free": 1}, swap_bytes={("out", "host"): 5})), ()),
        (Leaving(epoch), ()),
        (Formed(epoch, number), ()),
        (Prepared(epoch, number, None, "h", 1, "h:1", 480, 2, (8,) * NUM_LAYERS, 4, (row,)), blocks),
        (Planned(epoch, number, 1, (ticket,)), (79, 3, 19)),
        (HandedOver(epoch, number, (row,)), blocks),
        (GroupDone(epoch, number, where), ()),
        (Copied(epoch, number, where, dice.randint(1, 9), dice.random() < 0.5), ()),
        (KvHeld(epoch, number, dice.random() < 0.7, "h:1"), blocks),
        (KvPulled(epoch, number, dice.random() < 0.7), ()),
        (RequestStopped(epoch, number, dice.random() < 0.7, known, known - 1), blocks),
    ]


def damage(dice: Random, value: Any) -> Any:
    """Return a JSON value with one part replaced, left out, or repeated."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(sorted(value))
        if dice.random() < 0.05:
            return {key: item for key, item in value.items() if key != name}
        return value | {name: damage(dice, value[name])}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        if dice.random() < 0.1:
            return value * dice.choice([0, 2, 50])
        return [*value[:place], damage(dice, value[place]), *value[place + 1 :]]
    if type(value) is int and dice.random() < 0.5:
        return value + dice.choice([-1, 1, 3, 100])
    return dice.choice(JUNK)


class Story:
    """A router of one kind with honest instances, clients, and an instance that sometimes sends bad messages."""

    def __init__(self, seed: int, kind: str) -> None:
        self.dice, self.kind = Random(seed), kind
        tokens: dict[str, int | None] = {f"t{slot}": slot for slot in range(NUM_SLOTS)}
        ignore: Callable[[Any], None] = lambda _: None  # noqa: E731
        router = Router(
            60.0, tokens, FakeSlots(), ignore, NUM_SLOTS if kind == "pipeline" else None,
            SHAPES["tiny-deep"] if kind == "drop" else None, migrates=kind == "migrate", vocab_size=256,
        )  # fmt: skip
        self.router, self.world = router, World(router, NUM_SLOTS, kind == "pipeline")
        self.watch = RouterWatch(router)
        self.tainted: set[int] = set()
        self.callers: list[tuple[Any, Caller]] = []
        self.num_bad = self.num_survived = 0

    async def play(self) -> None:
        try:
            for slot in range(NUM_SLOTS):
                await self.world.join(slot)
            for _ in range(NUM_EVENTS):
                await self.event()
                self.check()
            await self.finish()
        finally:
            for bot in self.world.bots.values():
                bot.wire.close()
            await asyncio.gather(*self.world.tasks, return_exceptions=True)

    async def event(self) -> None:
        dice, living = self.dice, self.world.living()
        before = {bot.epoch for bot in living}
        what = dice.choice(EVENTS)
        allowed = {epoch for one in self.tainted for epoch in self.world.unit_of(one)}
        if len(living) < NUM_SLOTS and dice.random() < 0.7:
            (slot, *_) = {*range(NUM_SLOTS)} - {bot.slot for bot in living}
            await self.world.join(slot)
        elif what == "ask":
            self.ask()
        elif what == "hang up" and self.callers:
            self.router.requests.drop(self.callers.pop(dice.randrange(len(self.callers)))[0])
        elif what == "order":
            self.order()
        elif living:
            bot = dice.choice(living)
            if what == "bad":
                self.tainted.add(bot.epoch)
                allowed |= self.world.unit_of(bot.epoch)
                self.say_bad(bot)
            else:
                self.go_on(bot, what)
        await settle()
        for bot in self.world.bots.values():
            bot.listen()
        ended = before - {one.epoch for one in self.router.table.roster}
        assert ended <= allowed, (ended, allowed)
        if what == "bad":
            self.num_bad += 1
            self.num_survived += not ended

    def ask(self) -> None:
        dice = self.dice
        prompt = tuple(dice.randrange(256) for _ in range(dice.randint(1, 30)))
        logprobs = dice.choice([None, None, 2])
        request = make_request("r", prompt, 0.0, max_tokens=dice.randint(1, 12), logprobs=logprobs, ignore_eos=True)
        caller = Caller(ByteTokenizer(256), request)
        self.callers.append((self.router.requests.submit(request, caller), caller))

    def order(self) -> None:
        """An operator asks for a change, or an instance is cut off."""
        dice, router = self.dice, self.router
        epochs = [one.epoch for one in router.table.roster]
        try:
            if router.group_controller is not None and dice.random() < 0.7:
                groups = [group for group in router.group_controller.groups if group.state is GroupState.PIPELINED]
                router.group_controller.restore(groups[0].number) if groups else router.group_controller.drop(
                    dice.sample(epochs, 2)
                )
            elif router.migration_controller is not None and len(epochs) > 1:
                router.migration_controller.move_one(*dice.sample(epochs, 2))
        except (UserError, ValueError):
            return

    def go_on(self, bot: Bot, what: str) -> None:
        if what == "step" or not bot.orders:
            bot.step()
            bot.beat()
            return
        answer = bot.answer()
        if answer is not None:
            bot.say(*answer)

    def say_bad(self, bot: Bot) -> None:
        """Send a message that is due, or any other; damaged in zero to three places."""
        dice = self.dice
        some = templates(dice, bot, bot.epoch)
        due = bot.answer() if bot.orders and dice.random() < 0.5 else None
        message, integers = due or dice.choice(some)
        body, ids = unpack(pack(message))[0], list(integers)
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            if ids and dice.random() < 0.3:
                ids[dice.randrange(len(ids))] = dice.choice([-1, 0, 3, 80, 2**31 - 1, -(2**31)])
            elif dice.random() < 0.1:
                ids = ids * 2 if dice.random() < 0.5 else ids[1:]
            else:
                name = dice.choice(sorted(set(body) - {"kind", "epoch"}) or ["kind"])
                body[name] = damage(dice, body[name])
        try:
            bot.say_body(body, tuple(ids))
        except (ValueError, OverflowError):  # not a JSON number, or not 32 bits
            bot.feed(struct.pack("!II", 3, 0) + b"xyz")

    def check(self) -> None:
        """The router is alive, its books are consistent, and it has an entry for each open request."""
        router = self.router
        if router.failure is not None:
            raise router.failure
        router.table.check_integrity()
        if router.group_controller is not None:
            router.group_controller.groups.check_integrity()
        self.callers = [(entry, caller) for entry, caller in self.callers if not is_over(caller)]
        assert len(router.table) == len(self.callers)
        rows = self.watch().rows
        assert {n for n, row in rows.items() if row.reason is None} == {entry.number for entry, _ in self.callers}
        for row in RouterWatch(self.router)().rows.values():  # opened after they were placed
            placed_s = [time_s for time_s, kind, _ in row.events if kind == "placed"]
            assert not placed_s or row.first_token_s is None or placed_s[0] <= row.first_token_s, row

    async def finish(self) -> None:
        """End instances that sent bad messages; with honest instances every request ends."""
        for metric in ClusterMetrics("m", self.router).collect():
            assert all(sample.value == sample.value for sample in metric.samples)
        json.dumps(list_parts(self.router, 0.0), allow_nan=False).encode()
        for bot in self.world.living():
            if bot.epoch in {epoch for one in self.tainted for epoch in self.world.unit_of(one)}:
                bot.wire.close()
        await settle()
        for slot in {*range(NUM_SLOTS)} - {bot.slot for bot in self.world.living()}:
            await self.world.join(slot)
        for _ in range(400):
            for bot in self.world.living():
                bot.listen()
                self.go_on(bot, self.dice.choice(["step", "answer"]))
            await settle(4)
            self.check()
            if not self.callers:
                return
        raise AssertionError(f"{len(self.callers)} requests hang")


class FaultyStory(Story):
    """The bad message is a fault that may happen between honest processes. Tokens name their places in the request."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__(seed, kind)
        self.asked: list[tuple[Any, Caller]] = []
        self.faults: Counter[str] = Counter()

    async def event(self) -> None:
        self.tainted.clear()
        if self.router._controller is not None and self.dice.random() < 0.05:
            self.router._controller.look(time.monotonic() + 1000.0)  # no answer came for so long
        await super().event()

    def ask(self) -> None:
        super().ask()
        self.asked.append(self.callers[-1])

    def say_bad(self, bot: Bot) -> None:
        faults = [self.die, self.leave, self.refuse, self.give_back, self.fail, self.repeat]
        fault = self.dice.choice(faults)
        fault(bot)
        self.faults[fault.__name__] += 1

    def die(self, bot: Bot) -> None:
        bot.wire.close()

    def leave(self, bot: Bot) -> None:
        """It is stopped: what it has ends elsewhere, or some of it here."""
        bot.say(Leaving(bot.epoch))
        if self.dice.random() < 0.5:
            bot.step()
        bot.wire.close()

    def refuse(self, bot: Bot) -> None:
        """It takes no request that it has not begun."""
        new = [ticket for ticket, (known, submit) in bot.lengths.items() if known == submit.num_prompt]
        for ticket in new[:1]:
            del bot.lengths[ticket]
            bot.say(Refused(bot.epoch, ticket, "stopping", "m", None))

    def give_back(self, bot: Bot) -> None:
        """It aborts a request."""
        for ticket in list(bot.lengths)[:1]:
            del bot.lengths[ticket]
            bot.say(Tokens(bot.epoch, (TokenRow(ticket, None, None, 0, None),)))

    def fail(self, bot: Bot) -> None:
        """It cannot do what it is ordered."""
        order = bot.orders[0][0] if bot.orders else None
        if isinstance(order, StopRequest):
            bot.orders.popleft()
            bot.say(RequestStopped(bot.epoch, order.number, False, 0, 0))
            return
        answer = bot.answer()
        match answer:
            case (Copied() | KvPulled() as message, _):
                bot.say(replace(message, is_whole=False))
            case (KvHeld() as message, _):
                bot.say(replace(message, is_running=False))
            case (Prepared() as message, _):
                bot.say(replace(message, problem="no", rows=()))
            case (message, integers):
                bot.say(message, integers)

    def repeat(self, bot: Bot) -> None:
        """It answers twice."""
        answer = bot.answer()
        for _ in range(2 * (answer is not None)):
            bot.say(*answer)  # type: ignore[misc]

    def check(self) -> None:
        super().check()
        for bot in self.world.living() if self.kind in ("plain", "migrate") else ():
            tickets = self.router.table.roster.expect(bot.epoch).tickets
            assert bot.lengths.keys() <= tickets, "an instance goes on with a request that is not on it"

    async def finish(self) -> None:
        await super().finish()
        for entry, caller in self.asked:
            deltas, (num_prompt, most) = ended_of(caller), (len(entry.request.prompt_token_ids), entry.request.params)
            if deltas is not None:
                tokens = [token for delta in deltas for token in delta.token_ids]
                assert tokens == [place % 256 for place in range(num_prompt, num_prompt + (most.max_tokens or 0))]


def ended_of(caller: Caller) -> list[OutputDelta] | None:
    """The deltas of a request; None if its client has hung up, or too many instances ended under it."""
    items = list(caller.deltas._queue)  # type: ignore[attr-defined]
    if not is_over(caller) or "3 instances in a row" in str(items[-1]):
        return None
    assert [item.finish_reason for item in items] == [None] * (len(items) - 1) + ["length"]
    return items


def is_over(caller: Caller) -> bool:
    items = list(caller.deltas._queue)  # type: ignore[attr-defined]
    return any(isinstance(one, BaseException) or one.finish_reason is not None for one in items)


S = TypeVar("S", bound=Story)


def play(seed: int, kind: str, make: Callable[[int, str], S] = Story) -> S:  # type: ignore[assignment]
    async def run() -> S:
        story = make(seed, kind)
        await story.play()
        return story

    return asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(4))
@given(seed=st.integers(0, 2**32))
def test_bad_message_ends_its_own_connection_and_nothing_else(kind: str, seed: int) -> None:
    play(seed, kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(4))
@given(seed=st.integers(0, 2**32))
def test_a_fault_at_any_place_costs_no_token_and_repeats_none(kind: str, seed: int) -> None:
    play(seed, kind, FaultyStory)


# -- negative controls -------------------------------------------------------------------------------------------------


def test_messages_without_bounds_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_check", lambda value, kinds, bounds: value)
    monkeypatch.setattr(messages, "_is_count", lambda value, most: type(value) is int)
    with pytest.raises((ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)):
        for seed in range(200):
            play(seed, KINDS[seed % len(KINDS)])
