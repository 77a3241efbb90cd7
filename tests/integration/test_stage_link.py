"""Links between stages: frames arrive as sent; a fault of the other end is reported and blocks nothing else."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import socket
import struct
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.wire import stage_link
from floodplain.cluster.wire.frames import Frame
from floodplain.cluster.wire.stage_link import MAX_UNREAD, LinkKey, StageLink, accept_link, dial_link
from floodplain.core.errors import PeerLost
from floodplain.web import accepting
from tests.support.examples import examples
from tests.support.stage_links import KEY, MAX_DATA_BYTES, linked, listen, open_link
from tests.support.waiting import HANG_S

BIG = Frame({"chunk": 1}, data=np.ones(MAX_DATA_BYTES, dtype=np.uint8))


def is_same(a: Frame, b: Frame) -> bool:
    return a.body == b.body and np.array_equal(a.integers, b.integers) and np.array_equal(a.data, b.data)


def test_frames_arrive_as_they_were_sent() -> None:
    @settings(max_examples=examples(30), deadline=None)
    @given(
        frames=st.lists(
            st.builds(
                Frame,
                st.dictionaries(st.text(max_size=5), st.integers() | st.none() | st.text(max_size=9), max_size=3),
                st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9).map(lambda v: np.array(v, dtype=np.int64)),
                st.binary(max_size=300).map(lambda v: np.frombuffer(v, dtype=np.uint8)),
            ),
            max_size=8,
        )
    )
    def check(frames: list[Frame]) -> None:
        for frame in frames:
            sender.send(frame)
        assert all(is_same(frame, receiver.recv()) for frame in frames)

    with linked() as (sender, receiver):
        check()


def test_two_stages_that_send_at_once_do_not_wait_for_each_other() -> None:
    with linked() as (to_b, from_a), linked() as (to_a, from_b), ThreadPoolExecutor(2) as threads:
        sends = [threads.submit(link.send, BIG) for link in (to_b, to_a)]  # both send before either reads
        for send in sends:
            send.result(HANG_S)
        assert is_same(from_a.recv(), BIG) and is_same(from_b.recv(), BIG)


def test_a_sender_whose_reader_stands_still_is_freed_by_close() -> None:
    ours, other = socket.socketpair()  # the other end reads nothing
    with other, ThreadPoolExecutor(2) as threads:
        link = StageLink(ours, MAX_DATA_BYTES)
        sending = threads.submit(link.send, BIG)  # more than any buffer on the way
        reading = threads.submit(link.recv)
        assert other.recv(1)
        link.close()
        for waiting in (sending, reading):
            with pytest.raises(PeerLost):
                waiting.result(HANG_S)
        link.close()


def test_what_came_before_the_end_is_given_out_and_then_the_end_stays() -> None:
    with linked() as (sender, receiver):
        sender.send(Frame({"step": 1}))
        sender.close()
        assert receiver.recv().body == {"step": 1}
        for _ in range(2):
            with pytest.raises(PeerLost, match="hung up"):
                receiver.recv()
        with pytest.raises(PeerLost):
            while True:  # the first frames go into buffers of the system
                receiver.send(Frame({}))


def raw_frame(body: bytes = b"{}", num_integers: int = 0, num_data: int = 0, tail: bytes = b"") -> bytes:
    return struct.pack("!IIQ", len(body), num_integers, num_data) + body + tail


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (raw_frame(num_data=100, tail=b"x" * 60), "hung up"),
        (raw_frame()[:7], "hung up"),
        (raw_frame(b"[1]"), "no JSON object"),
        (raw_frame(num_data=101), "are allowed"),
        (struct.pack("!IIQ", 2**32 - 1, 0, 0), "are allowed"),
        (raw_frame() * (MAX_UNREAD + 1), "steps ahead"),
    ],
)
def test_a_sender_that_ends_in_mid_message_or_sends_garbage_is_lost(sent: bytes, why: str) -> None:
    """The link delivers the whole frames before, then ends with the reason."""
    with ExitStack() as stack:
        theirs, ours = socket.socketpair()
        receiver = StageLink(theirs, max_data_bytes=100)
        stack.callback(receiver.close)
        with ours:
            ours.sendall(raw_frame(json.dumps({"step": 0}).encode()) + sent)
        receiver._reader.join(HANG_S)
        assert receiver.recv().body == {"step": 0}
        with pytest.raises(PeerLost, match=why):
            while True:
                receiver.recv()


# -- which stages may dial ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [replace(KEY, secret=bytes(32)), replace(KEY, number=6), replace(KEY, sender=1)], ids=str
)
async def test_only_the_right_secret_pipeline_and_stage_are_let_in(key: LinkKey) -> None:
    with listen() as listener:
        address = listener.getsockname()[:2]
        accepting = asyncio.create_task(accept_link(listener, KEY, MAX_DATA_BYTES))
        with pytest.raises(PeerLost, match="does not take this pipeline's secret"):
            await dial_link(*address, key, MAX_DATA_BYTES)
        silent = socket.create_connection(address)  # sends nothing
        half = socket.create_connection(address)
        half.sendall(KEY.hello()[:10])
        sender = await dial_link(*address, KEY, MAX_DATA_BYTES)
        receiver = await accepting
        sender.send(Frame({"step": 1}))
        assert receiver.recv().body == {"step": 1}
        for end in (sender, receiver, silent, half):
            end.close()


def test_a_wait_that_is_cancelled_at_any_time_leaves_no_socket_open() -> None:
    """Cancelled after 0 to 11 turns of the event loop: connections may be accepted, read or admitted by then."""
    num_links = 0

    async def run(num_turns: int) -> None:
        nonlocal num_links
        with listen() as listener, ExitStack() as stack:
            dialled = [stack.enter_context(socket.create_connection(listener.getsockname()[:2])) for _ in range(3)]
            for sock, num_sent in zip(dialled, (0, 10, None), strict=True):
                sock.sendall(KEY.hello()[:num_sent])
            waiting = asyncio.create_task(accept_link(listener, KEY, MAX_DATA_BYTES))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                (await waiting).close()
                num_links += 1
            listener.close()  # the system closes connections that were not accepted
            for sock in dialled:
                sock.settimeout(HANG_S)
                read_all(sock)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_turns in range(12):
            asyncio.run(asyncio.wait_for(run(num_turns), HANG_S))
            gc.collect()
    assert not [one.message for one in caught if issubclass(one.category, ResourceWarning)]
    assert 0 < num_links < 12


@contextmanager
def waiting_at(listener: socket.socket) -> Iterator[asyncio.Task[StageLink]]:
    waiting = asyncio.create_task(accept_link(listener, KEY, MAX_DATA_BYTES))
    try:
        yield waiting
    finally:
        waiting.cancel()


async def is_hung_up_on(sock: socket.socket) -> bool:
    """Wait until the other end closes or sends; True if it has closed."""
    sock.setblocking(False)
    return not await asyncio.get_running_loop().sock_recv(sock, 1)


@pytest.mark.parametrize("why", ["half a hello", "too many", "too late"])
async def test_connections_that_show_no_key_are_closed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "too late":
        monkeypatch.setattr(stage_link, "HELLO_TIMEOUT_S", 0.01)
    elif why == "too many":
        monkeypatch.setattr(stage_link, "MAX_UNADMITTED", 2)
    with listen() as listener, waiting_at(listener), ExitStack() as stack:
        dial = partial(socket.create_connection, listener.getsockname()[:2])
        first = stack.enter_context(dial())
        if why == "half a hello":
            first.sendall(KEY.hello()[:10])
            first.shutdown(socket.SHUT_WR)
        elif why == "too many":
            for _ in range(2):
                stack.enter_context(dial())
        assert await is_hung_up_on(first)


async def test_accepting_goes_on_after_a_shortage_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scarce(socket.socket):
        num_refused = 0

        def accept(self) -> Any:
            if self.num_refused < 2:
                self.num_refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(accepting, "RETRY_S", 0.01)
    with Scarce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        for end in await open_link(listener):
            end.close()
        assert listener.num_refused == 2


def test_of_two_connections_with_the_key_one_is_the_link() -> None:
    with listen() as listener, socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.connect(listener.getsockname()[:2])
            sock.sendall(KEY.hello())
        link = asyncio.run(asyncio.wait_for(accept_link(listener, KEY, MAX_DATA_BYTES), HANG_S))
        link.send(Frame({"step": 1}))
        link.close()
        listener.close()  # the system closes a connection that was not accepted
        assert sum(b"step" in read_all(sock) for sock in (one, other)) == 1


def read_all(sock: socket.socket) -> bytes:
    """All bytes until the other end closes."""
    data = b""
    with suppress(ConnectionError):
        while more := sock.recv(2**16):
            data += more
    return data


async def test_an_unreachable_stage_is_one_line_and_accepting_can_be_cancelled() -> None:
    listener = listen()
    host, port = listener.getsockname()[:2]
    listener.close()
    with pytest.raises(PeerLost, match=f"the next stage at {host}:{port} cannot be reached"):
        await dial_link(host, port, KEY, MAX_DATA_BYTES)
    with listen() as other:
        waiting = asyncio.create_task(accept_link(other, KEY, MAX_DATA_BYTES))
        dialling = asyncio.create_task(dial_link(*other.getsockname()[:2], replace(KEY, number=1), 1))
        with pytest.raises(PeerLost):
            await dialling
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for end in await open_link(other):  # the listener still works
            end.close()
