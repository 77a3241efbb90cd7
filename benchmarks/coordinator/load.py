"""What is asked of the coordinator: lives of leases, one message a request, or the heartbeats of many hosts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.coordinator.connection import Connection, connect
from floodplain.leases.messages import Heartbeat, Join, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Reply, Shard
from floodplain.leases.states import LeaseEvent, Stamp
from floodplain.lending.wire import decode_reply, encode_message

LEASE_BYTES = 2**28
PAIRS_PER_REQUEST = 200
NUM_OPERATIONS = 6
"""Of one life: request, hold, recall, release, observe, offer."""


@dataclass(slots=True)
class Load:
    """What an open loop saw.

    Attributes:
        latencies_s: From the time that an operation was due to its answer.
        outcomes: How often what was answered.
    """

    latencies_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


class Pair:
    """A producer and a consumer of its bytes, each with a connection of its own; their leases live and end."""

    def __init__(self, index: int, producer: Connection, consumer: Connection) -> None:
        self.names = f"p{index}", f"c{index}"
        self._producer, self._consumer = producer, consumer
        self._number = self._next = 0
        self._lock = asyncio.Lock()

    async def join(self) -> None:
        """Both join, and the producer puts bytes up."""
        for name, connection in zip(self.names, (self._producer, self._consumer), strict=True):
            reply = await say(connection, Join(name, f"{name}-bench"))
            assert reply.outcome.value == "applied", reply
            if name == self.names[0]:
                await self._put_up(reply)

    async def _put_up(self, reply: Reply) -> None:
        assert reply.member is not None
        self._row = reply.member
        self._learn(await say(self._producer, Offer(self.names[0], self._row.stamp, LEASE_BYTES)))

    async def operate(self, load: Load, due_s: float, clock: Callable[[], float]) -> None:
        """The next operation of this pair's lives, once the last one has its answer."""
        async with self._lock:
            connection, message = self._message()
            reply = await say(connection, message)
            load.latencies_s.append(clock() - due_s)
            load.outcomes[f"{type(message).__name__.lower()} {reply.outcome.value}"] += 1
            self._learn(reply)
            self._next = (self._next + 1) % NUM_OPERATIONS

    def _learn(self, reply: Reply) -> None:
        for lease in reply.leases:
            self._lease = lease
        if reply.member is not None and reply.member.name == self.names[0]:
            self._row = reply.member

    def _message(self) -> tuple[Connection, Message]:
        producer, consumer = self.names
        if self._next == 0:
            self._number += 1
            return self._consumer, Request(consumer, 1, self._number, (Shard(LEASE_BYTES, producer),))
        if self._next in (1, 3):
            event = LeaseEvent.HOLD if self._next == 1 else LeaseEvent.RELEASE
            return self._consumer, Report(consumer, self._lease.lease_id, self._stamp(), event)
        row = Stamp(1, self._row.revision + (self._next == 2))  # the report of an allocation raised it
        if self._next == 2:
            return self._producer, Recall(producer, row, LEASE_BYTES, 30.0)
        if self._next == 4:
            return self._producer, Observe(producer, row, 0)
        return self._producer, Offer(producer, row, LEASE_BYTES)

    def _stamp(self) -> Stamp:
        return Stamp(1, self._lease.revision)


async def say(connection: Connection, message: Message) -> Reply:
    """One message in a request of its own."""
    return (await say_all(connection, [message]))[0]


async def say_all(connection: Connection, messages: list[Message]) -> list[Reply]:
    """Several in one request."""
    body = {"messages": [encode_message(message) for message in messages]}
    status, answer = await connection.ask("POST", "/v1/messages", body)
    assert status == 200, answer
    return [decode_reply(reply) for reply in json.loads(answer)["replies"]]


async def lend_to_each_other(connection: Connection, names: list[str]) -> None:
    """Every device joins; each second one has lent a lease to the one after it."""
    pairs = list(zip(names[::2], names[1::2], strict=True))
    for start in range(0, len(pairs), PAIRS_PER_REQUEST):
        messages: list[Message] = []
        for producer, consumer in pairs[start : start + PAIRS_PER_REQUEST]:
            shards = (Shard(LEASE_BYTES, producer),)
            messages += [Join(producer, f"{producer}-bench"), Offer(producer, Stamp(1, 1), LEASE_BYTES)]
            messages += [Join(consumer, f"{consumer}-bench"), Request(consumer, 1, 1, shards)]
        replies = await say_all(connection, messages)
        assert all(reply.outcome.value == "applied" for reply in replies), replies


async def connect_pairs(port: int, num_connections: int) -> list[Pair]:
    """Pairs that have joined, with two connections each."""
    connections = [await connect(port) for _ in range(num_connections)]
    pairs = [Pair(i, connections[2 * i], connections[2 * i + 1]) for i in range(num_connections // 2)]
    for pair in pairs:
        await pair.join()
    return pairs


async def run_open_loop(
    operate: Callable[[int, float], Awaitable[None]], rate: float, seconds: float, seed: int
) -> None:
    """Begin operations at a mean ``rate`` by exponential gaps, whatever became of those before.

    Args:
        operate: Called with the operation's number and when it was due, on the loop's clock.
        rate: Operations per second.
        seconds: For how long operations begin.
        seed: Of the gaps.
    """
    loop, random = asyncio.get_running_loop(), Random(seed)
    due_s, end_s, tasks, number = loop.time(), loop.time() + seconds, [], 0
    while (due_s := due_s + random.expovariate(rate)) < end_s:
        if (left_s := due_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        tasks.append(asyncio.ensure_future(operate(number, due_s)))
        number += 1
    await asyncio.gather(*tasks)


async def beat_host(connection: Connection, names: list[str]) -> int:
    """The heartbeats of one host's devices in one request; how many leases the answers told of."""
    messages = [encode_message(Heartbeat(name, 1)) for name in names]
    status, body = await connection.ask("POST", "/v1/messages", {"messages": messages})
    replies = json.loads(body)["replies"] if status == 200 else []
    assert [reply["outcome"] for reply in replies] == ["applied"] * len(names), body[:200]
    return sum(len(reply["leases"]) for reply in replies)
