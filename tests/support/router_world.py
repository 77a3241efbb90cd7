"""A real router in memory, with instances that obey it: bytes go both ways, without sockets, processes or engines."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from floodplain.cluster.router.door import Door
from floodplain.cluster.router.router import Router
from floodplain.cluster.wire.frames import CONTROL, FrameLink
from floodplain.cluster.wire.group_messages import (
    Adopt,
    Answer,
    Close,
    Collect,
    Copied,
    Drop,
    Fetch,
    Fill,
    GroupDone,
    HandedOver,
    KvRow,
    Move,
    Plan,
    Planned,
    Prepare,
    Prepared,
    Return,
    Settle,
)
from floodplain.cluster.wire.messages import (
    Abort,
    Beat,
    Form,
    Formed,
    GoOn,
    Hello,
    HoldKv,
    InstanceFacts,
    KvHeld,
    KvPulled,
    PullKv,
    RequestStopped,
    StageFacts,
    StopRequest,
    TokenRow,
    Tokens,
    Welcome,
    pack,
    read_router_message,
)
from floodplain.cluster.wire.placements import Submit
from floodplain.core.plan import TokenLogprobs
from floodplain.engine.outputs import EngineStats

BLOCK_TOKENS, NUM_BLOCKS, NUM_LAYERS = 4, 80, 12
FACTS = InstanceFacts("1", "f", "float32", 256, BLOCK_TOKENS, NUM_BLOCKS, "host", 1)
_DONE = {
    Drop: Answer.DROPPED,
    Settle: Answer.SETTLED,
    Move: Answer.MOVED,
    Fill: Answer.FILLED,
    Return: Answer.RETURNED,
    Close: Answer.CLOSED,
}


def unpack(frame: bytes) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the object and the integers of a control frame."""
    num_text, num_ids = struct.unpack("!II", frame[:8])
    assert len(frame) == 8 + num_text + num_ids
    return json.loads(frame[8 : 8 + num_text]), struct.unpack(f"<{num_ids // 4}i", frame[8 + num_text :])


class Wire:
    """Stands for the two streams of a connection of the router."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.sent: deque[tuple[Any, tuple[int, ...]]] = deque()
        self.is_over = False

    # -- the writer's methods that frames use --------------------------------------------------------------------------

    @property
    def transport(self) -> Wire:
        return self

    def write(self, data: bytes) -> None:
        body, integers = unpack(data)
        self.sent.append((read_router_message(body), integers))

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.reader.feed_eof()

    abort = close

    async def wait_closed(self) -> None:
        return


@dataclass
class Bot:
    """An instance that obeys its orders when the test chooses."""

    wire: Wire
    slot: int
    epoch: int = 0
    denied: bool = False
    lengths: dict[int, tuple[int, Submit]] = field(default_factory=dict)  # by ticket: known tokens
    orders: deque[tuple[Any, tuple[int, ...]]] = field(default_factory=deque)
    moving: dict[int, int] = field(default_factory=dict)  # tickets by migration
    leads: bool = False

    def say(self, message: Any, integers: tuple[int, ...] = ()) -> None:
        self.feed(pack(message, integers))

    def say_body(self, body: dict[str, Any], integers: tuple[int, ...] = ()) -> None:
        self.feed(CONTROL.pack(body, integers))

    def feed(self, data: bytes) -> None:
        if not self.wire.is_over:
            self.wire.reader.feed_data(data)

    def listen(self) -> None:
        """Receive the router's messages; orders are queued."""
        while self.wire.sent:
            message, integers = self.wire.sent.popleft()
            match message:
                case Welcome():
                    self.epoch = message.epoch
                case Submit():
                    self._take(message, integers)
                case Adopt() | GoOn():
                    self._take(message.submit, integers)
                case Abort():
                    self.lengths.pop(message.ticket, None)
                case _:
                    self.orders.append((message, integers))

    def _take(self, submit: Submit, tokens: tuple[int, ...]) -> None:
        self.lengths[submit.ticket] = len(tokens), submit

    def known(self, ticket: int) -> int:
        """Return the number of tokens of a request; 0 if it is not here."""
        return self.lengths[ticket][0] if ticket in self.lengths else 0

    def step(self) -> None:
        """Send one token of each of its requests."""
        rows = []
        for ticket, (known, submit) in list(self.lengths.items()):
            is_last = known + 1 - submit.num_prompt >= (submit.params.max_tokens or 0)
            logprobs = None if submit.params.logprobs is None else TokenLogprobs(-1.0, ((1, -1.0),))
            rows.append(TokenRow(ticket, known % 256, "length" if is_last else None, 0, logprobs))
            self.lengths[ticket] = known + 1, submit
            if is_last:
                del self.lengths[ticket]
        self.say(Tokens(self.epoch, tuple(rows)))

    def beat(self) -> None:
        self.say(Beat(self.epoch, EngineStats(num_blocks=NUM_BLOCKS, kv_blocks={"free": 3}, num_steps=1)))

    def answer(self) -> tuple[Any, tuple[int, ...]] | None:
        """Obey the oldest order and return the reply; None if there is no order, or it needs no reply."""
        if not self.orders:
            return None
        order = self.orders.popleft()[0]
        number = getattr(order, "number", 0)
        match order:
            case Form():
                return Formed(self.epoch, number), ()
            case Prepare():
                rows, blocks = self._rows()
                where = "h", 1 + self.slot, f"h:{1 + self.slot}"
                return Prepared(self.epoch, number, None, *where, 480, 2, (8,) * NUM_LAYERS, 4, rows), blocks
            case Fetch() | Collect():
                answer = Answer.FETCHED if isinstance(order, Fetch) else Answer.COLLECTED
                for held in order.held[1:]:
                    self.say(Copied(self.epoch, number, answer, held.request, True))
                return Copied(self.epoch, number, answer, order.held[0].request, True), ()
            case Plan():
                return Planned(self.epoch, number, 0, ()), ()
            case Return() if self.leads:
                rows, blocks = self._rows()
                self.lengths.clear()
                return HandedOver(self.epoch, number, rows), blocks
            case HoldKv():
                self.moving[number] = order.ticket
                known = self.known(order.ticket)
                blocks = tuple(range(order.num_copied, max(0, known - 1) // BLOCK_TOKENS))
                return KvHeld(self.epoch, number, known > 0, "h:1"), blocks
            case PullKv():
                return KvPulled(self.epoch, number, True), ()
            case StopRequest():
                known = self.known(self.moving.get(number, 0))
                self.lengths.pop(self.moving.get(number, 0), None)
                blocks = tuple(range(order.num_copied, -(-(known - 1) // BLOCK_TOKENS)))
                return RequestStopped(self.epoch, number, known > 0, known, max(0, known - 1)), blocks
        if isinstance(order, Drop):
            self.lengths.clear()
            self.leads = order.place == 0
        return self._done(order)

    def _done(self, order: Any) -> tuple[Any, tuple[int, ...]] | None:
        kind = type(order)
        return (GroupDone(self.epoch, order.number, _DONE[kind]), ()) if kind in _DONE else None

    def _rows(self) -> tuple[tuple[KvRow, ...], tuple[int, ...]]:
        rows, num_blocks = [], 0
        for ticket, (known, _) in self.lengths.items():
            mine = -(-(known - 1) // BLOCK_TOKENS)
            if num_blocks + mine <= NUM_BLOCKS // 2:
                rows.append(KvRow(ticket, known, known - 1, mine))
                num_blocks += mine
        return tuple(rows), tuple(range(num_blocks))


async def settle(num_rounds: int = 12) -> None:
    """Run all ready tasks for some rounds."""
    for _ in range(num_rounds):
        await asyncio.sleep(0)


class World:
    """A router, its instances by slot, and the tasks of their connections."""

    def __init__(self, router: Router, num_slots: int, is_pipeline: bool) -> None:
        self.router, self.num_slots, self._is_pipeline = router, num_slots, is_pipeline
        self.bots: dict[int, Bot] = {}
        tokens: dict[str, int | None] = {f"t{slot}": slot for slot in range(num_slots)}
        with socket.socket() as unused:
            router._door = Door(unused, tokens, router._welcome)
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, slot: int) -> Bot:
        """Begin a life of an instance in this slot."""
        wire = Wire()
        bot = Bot(wire, slot)
        self.tasks.append(asyncio.create_task(self.router._welcome(FrameLink(wire.reader, wire))))  # type: ignore[arg-type]
        stage = StageFacts(slot, self.num_slots, "h", 1 + slot) if self._is_pipeline else None
        bot.say(Hello(f"t{slot}", FACTS, stage, can_drop=not self._is_pipeline, can_move=not self._is_pipeline))
        await settle()
        bot.listen()
        assert bot.epoch
        self.bots[slot] = bot
        return bot

    def living(self) -> list[Bot]:
        return [bot for bot in self.bots.values() if self.router.table.roster.get(bot.epoch) is not None]

    def unit_of(self, epoch: int) -> set[int]:
        """Return the epochs of all lives that end together with this one."""
        router, found = self.router, {epoch}
        groups = [] if router.group_controller is None else list(router.group_controller.groups)
        units = [set(group.epochs) for group in groups]
        units += [] if router._forming is None else [set(one.epochs) for one in router._forming.pipelines]
        for unit in units + units:
            if unit & found:
                found |= unit
        return found
