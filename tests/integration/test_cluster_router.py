"""The router over real sockets: which instances may join, where requests go, also when instances end."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from floodplain.cluster.instance.session import Session
from floodplain.cluster.router.door import LEAST_STAY_S, MAX_UNADMITTED
from floodplain.cluster.router.requests import Caller
from floodplain.cluster.wire.messages import Abort, Accepted, Hello, Leaving, Refused, TokenRow, Tokens, Welcome
from floodplain.cluster.wire.placements import Submit
from floodplain.core.errors import QueueFull, RequestGivenUp, RequestRefused
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import Request
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.outputs import EngineStats, OutputDelta
from floodplain.engine.step_meter import StepMeter
from floodplain.model.tokenizer import ByteTokenizer
from tests.support import cluster_peers
from tests.support.cluster_peers import FACTS, OUTSIDE, OWN, reference, stage, until
from tests.support.loops import make_request
from tests.support.waiting import HANG_S


async def read_all(caller: Any) -> tuple[list[int], str, str | None]:
    """(tokens, text, finish reason) of a stream."""
    tokens: list[int] = []
    text = ""
    while True:
        delta = await caller.deltas.get()
        if isinstance(delta, BaseException):
            raise delta
        tokens += delta.token_ids
        text += delta.text
        if delta.finish_reason is not None:
            return tokens, text, delta.finish_reason


# -- which instances may join ------------------------------------------------------------------------------------------


async def test_rejected_instances_get_the_reason_and_no_epoch() -> None:
    async with stage() as some:
        early = await some.join(OUTSIDE)
        assert (early.epoch, early.denied) == (0, "")  # disconnected: it may dial again
        assert (await some.join("wrong")).denied.startswith("the router does not know this token")
        assert (await some.join(OWN)).epoch == 1
        assert "start it with --dtype float32" in (await some.join(OUTSIDE, dtype="bfloat16")).denied
        assert "its model is not the others'" in (await some.join(OUTSIDE, fingerprint="g")).denied
        assert (await some.join(OUTSIDE)).epoch == 2
        assert some.slots.joined == some.slots.serving == [0]


async def test_bytes_that_are_no_hello_are_hung_up_on() -> None:
    async with stage() as some:
        for data in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("!II", 2**31, 0), struct.pack("!II", 2, 0) + b"{}"):
            peer = await some.dial()
            peer.link.send(data)
            assert await peer.read() is None
        first = await some.dial()
        first.say(Leaving(1))
        assert await first.read() is None
        assert len(some.router.table.roster) == 0


@pytest.mark.parametrize("is_scarce", [False, True])
async def test_the_oldest_unauthenticated_connection_is_closed_for_a_new_one(
    is_scarce: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If there are ``MAX_UNADMITTED``, or no file descriptor is left."""
    monkeypatch.setattr(cluster_peers, "bind", bind_scarce)
    caplog.set_level("WARNING")
    async with stage() as some:
        door: Any = some.router._door
        now_s = [0.0]
        door._clock = lambda: now_s[0]
        dialled = [await some.dial() for _ in range(2 if is_scarce else MAX_UNADMITTED)]
        await until(lambda: len(door._unadmitted) == len(dialled))
        if is_scarce:
            oldest = next(iter(door._unadmitted))
            some.sock.is_scarce = lambda: oldest in door._unadmitted  # type: ignore[attr-defined]
        joining = asyncio.create_task(some.join(OWN))
        await until(lambda: caplog.records)  # all unauthenticated connections are too young to be closed
        now_s[0] = LEAST_STAY_S
        assert (await joining).epoch == 1
        assert await dialled[0].read() is None
        dialled[-1].say(Hello(OUTSIDE, FACTS))
        assert isinstance(await dialled[-1].read(), Welcome)
        assert len(caplog.records) == 1 and not caplog.records[0].exc_info


async def test_a_connection_whose_task_is_cancelled_before_it_begins_is_closed() -> None:
    async with stage() as some:
        door: Any = some.router._door
        ours, theirs = socket.socketpair()
        with theirs:
            door.take(ours)
            [task] = door._unadmitted
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert ours.fileno() == -1


class ScarceSocket(socket.socket):
    """Has no file descriptor for the next connection while ``is_scarce()``."""

    is_scarce = staticmethod(lambda: False)

    def accept(self) -> Any:
        if self.is_scarce():
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def bind_scarce(host: str, port: int) -> socket.socket:
    sock = ScarceSocket()
    sock.bind((host, port))
    return sock


async def test_an_instance_whose_slot_is_shut_dials_until_it_is_open() -> None:
    async with stage() as some:
        some.slots.shut.add(0)
        assert (await some.join(OWN)).epoch == 0 and some.slots.joined == []
        some.slots.shut.clear()
        assert (await some.join(OWN)).epoch == 1 and some.slots.joined == [0]


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_deaths_at_any_token_cost_no_token_and_no_text() -> None:
    """Several instances send a few tokens each and disconnect; a stop string spans a move."""

    def entry_ended(caller: Any) -> bool:
        return caller.lifecycle.events[-1][1].value == "finished"

    async with stage() as some:
        entry, caller = some.ask(max_tokens=20)
        stopped, stopped_caller = some.ask(max_tokens=20, stop=("".join(map(chr, reference(entry.request)[4:9])),))
        for _ in range(10):
            peer = await some.join()
            while len(peer.requests) < (not entry_ended(caller)) + (not entry_ended(stopped_caller)):
                await peer.read()
            for ticket in list(peer.requests):
                peer.step(ticket, min(2, 20 - len(peer.tokens[ticket]) + 5))
            peer.link.abort()
            await until(lambda: not len(some.router.table.roster))
        tokens, text, reason = await read_all(caller)
        assert (tokens, text, reason) == (
            reference(entry.request),
            "".join(map(chr, reference(entry.request))),
            "length",
        )
        tokens, text, reason = await read_all(stopped_caller)
        assert (text, reason) == ("".join(map(chr, reference(stopped.request)[:4])), "stop")
        assert some.router.requests.num_moved > 5 and some.router.requests.num_generated_tokens == 20 + len(tokens)
        assert len(some.finished) == 2


async def test_the_first_instance_that_takes_a_request_accepts_it_once() -> None:
    async with stage() as some:
        accepted: list[bool] = []
        one = await some.join()
        entry, caller = some.ask(max_tokens=1, on_accepted=lambda: accepted.append(True))
        first = (await one.read()).ticket
        one.say(Refused(one.epoch, first, "full", "many wait", None))
        one.say(Accepted(one.epoch, first))  # ignored: the request has ended
        with pytest.raises(QueueFull):
            await read_all(caller)
        assert not accepted
        entry, caller = some.ask(max_tokens=1, on_accepted=lambda: accepted.append(True))
        one.say(Accepted(one.epoch, (await one.read()).ticket))
        await until(lambda: accepted)
        one.link.abort()
        two = await some.join(OUTSIDE)
        two.say(Accepted(two.epoch, (await two.read()).ticket))
        two.step(entry.ticket)
        assert (await read_all(caller))[2] == "length"
        assert accepted == [True]


class HoldingEngine:
    """Accepts requests and generates no token; refuses prompts that begin with ``!``."""

    failure = None
    engine = SimpleNamespace(meter=StepMeter())

    def stats(self) -> EngineStats:
        return EngineStats()

    async def generate(
        self, request: Request, on_accepted: Callable[[], None], on_added: Any
    ) -> AsyncGenerator[OutputDelta]:
        if request.prompt_token_ids[0] == ord("!"):
            raise RequestRefused("too long")
        on_accepted()
        await asyncio.Event().wait()
        yield OutputDelta("", ())


async def test_an_instance_acknowledges_a_request_before_its_first_token() -> None:
    async with stage() as some:
        peer, accepted = await some.join(), asyncio.Event()
        session = Session(peer.link, Welcome(peer.epoch, 1.0, 60.0), cast(AsyncEngine, HoldingEngine()))
        running = asyncio.create_task(session.run(asyncio.Event(), 0.0))
        _, refused = some.ask(b"!", on_accepted=accepted.set)
        with pytest.raises(RequestRefused):
            await read_all(refused)
        assert not accepted.is_set()
        some.ask(on_accepted=accepted.set)
        await accepted.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_full_instance_passes_the_request_on_and_only_all_full_is_429() -> None:
    async with stage() as some:
        one, two = await some.join(), await some.join()
        entry, caller = some.ask(max_tokens=1)
        await one.read()
        one.say(Refused(one.epoch, entry.ticket, "full", "many wait", None))
        assert isinstance(await two.read(), Submit)
        two.say(Refused(two.epoch, entry.ticket, "full", "many wait", None))
        with pytest.raises(QueueFull, match="many wait"):
            await read_all(caller)
        entry, caller = some.ask(max_tokens=1)
        message = await one.read()
        one.say(Refused(one.epoch, message.ticket, "refused", "too long", "prompt"))
        with pytest.raises(RequestRefused, match="too long"):
            await read_all(caller)
        assert len(some.router.table) == 0


async def test_a_request_that_moved_is_never_refused_because_many_wait() -> None:
    async with stage() as some:
        one = await some.join()
        entry, caller = some.ask(max_tokens=2)
        await one.read()
        assert not one.requests[entry.ticket].is_accepted
        two = await some.join()
        one.link.abort()
        await two.read()
        assert two.requests[entry.ticket].is_accepted
        two.step(entry.ticket, 2)
        await read_all(caller)


async def test_the_first_token_is_noted_once_however_often_a_request_moves() -> None:
    async with stage() as some:
        first: list[Lifecycle] = []
        request = make_request("r", (5,), 0.0, max_tokens=3)
        caller = Caller(ByteTokenizer(256), request, on_first_token=first.append)
        entry = some.router.requests.submit(request, caller)
        for number in (1, 2):
            peer = await some.join()
            await peer.read()
            peer.step(entry.ticket)
            await until(lambda number=number: caller.deltas.qsize() == number)
            assert first == [caller.lifecycle]
            peer.link.abort()
            await until(lambda: not len(some.router.table.roster))


async def test_a_dropped_request_is_aborted_on_its_instance() -> None:
    async with stage() as some:
        one = await some.join()
        entry, _ = some.ask(max_tokens=9)
        await one.read()
        ticket = entry.ticket
        some.router.requests.drop(entry)
        some.router.requests.drop(entry)
        assert isinstance(await one.read(), Abort) and one.aborted == [ticket]
        one.step(ticket)  # ignored: the request was dropped
        other, caller = some.ask(max_tokens=1)
        await one.read()
        one.step(other.ticket)
        assert (await read_all(caller))[0] == reference(other.request)


async def test_a_request_under_which_instances_end_is_given_up() -> None:
    async with stage() as some:
        _, caller = some.ask(max_tokens=9)
        for _ in range(3):
            peer = await some.join()
            await peer.read()
            peer.link.abort()
            await until(lambda: not len(some.router.table.roster))
        with pytest.raises(RequestGivenUp, match="3 instances in a row ended under this request"):
            await read_all(caller)


async def test_suspects_are_computed_on_one_instance_one_after_the_other() -> None:
    async with stage() as some:
        asked = [some.ask(max_tokens=2) for _ in range(3)]
        for _ in range(2):
            peer = await some.join()
            for _ in asked:
                await peer.read()
            peer.link.abort()
            await until(lambda: not len(some.router.table.roster))
        peer = await some.join()
        (first, one), (second, _), (third, other) = asked
        assert (await peer.read()).ticket == first.ticket and second.ticket is third.ticket is None
        peer.step(first.ticket)  # it did not end the instances: the next is placed beside it
        assert (await peer.read()).ticket == second.ticket and third.ticket is None
        some.router.requests.drop(second)
        assert isinstance(await peer.read(), Abort)
        assert (await peer.read()).ticket == third.ticket
        peer.step(first.ticket)
        peer.step(third.ticket, 2)
        for entry, caller in ((first, one), (third, other)):
            assert (await read_all(caller))[0] == reference(entry.request)


async def test_a_stopping_instance_keeps_its_requests_and_gets_no_more() -> None:
    async with stage() as some:
        one = await some.join()
        entry, caller = some.ask(max_tokens=2)
        await one.read()
        one.say(Leaving(one.epoch))
        two = await some.join()
        await until(lambda: some.router.table.roster.expect(one.epoch).is_leaving)
        other, _ = some.ask(max_tokens=2)
        assert (await two.read()).ticket == other.ticket
        one.step(entry.ticket, 2)
        assert (await read_all(caller))[0] == reference(entry.request)
        one.link.abort()
        await until(lambda: some.router.num_ends == {"left": 1})
        two.say(Tokens(two.epoch, (TokenRow(other.ticket, None, None, 0, None),)))  # cannot go on with it
        assert (await two.read()).ticket == other.ticket > entry.number


# -- silence -----------------------------------------------------------------------------------------------------------


async def test_a_silent_instance_loses_its_epoch_and_joins_as_a_new_one() -> None:
    async with stage() as some:
        one = await some.join()
        entry, caller = some.ask(max_tokens=2)
        await one.read()
        one.step(entry.ticket)
        old_ticket = entry.ticket
        await until(lambda: entry.tokens)
        some.age(one.epoch, HANG_S + 1)
        await until(lambda: some.router.num_ends == {"silent": 1})
        assert some.slots.lost == [(0, "silent")]
        one.step(old_ticket)  # it resumes, and sends what it computed
        assert await one.read() is None
        two = await some.join()
        assert two.epoch > one.epoch
        await two.read()
        two.step(entry.ticket)
        assert (await read_all(caller))[0] == reference(entry.request)


async def test_beats_keep_an_instance_alive() -> None:
    async with stage() as some:
        one, two = await some.join(), await some.join()
        roster = some.router.table.roster
        for number in range(4):
            one.beat(num_blocks=33 + number)
            await until(lambda number=number: roster.expect(one.epoch).num_blocks == 33 + number)
            for epoch in (one.epoch, two.epoch):
                some.age(epoch, HANG_S / 3.5)  # silent after the fourth time, not in the loop
        await until(lambda: some.router.num_ends == {"silent": 1})
        assert [row.epoch for row in roster] == [one.epoch]
