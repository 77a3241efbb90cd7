"""Links between stages: what is sent arrives, and every fault of the other end is said, and holds nothing else up."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.stage_frames import Frame
from floodplain.cluster.stage_link import ACTIVATIONS, BULK, MAX_UNREAD, LinkKey, StageLink, accept_link, dial_link
from floodplain.core.errors import PeerLost
from tests.support.examples import examples
from tests.support.stage_links import KEY, MAX_DATA_BYTES, linked, listen, open_link

BIG = Frame({"chunk": 1}, data=np.ones(MAX_DATA_BYTES, dtype=np.uint8))


def is_same(a: Frame, b: Frame) -> bool:
    return a.body == b.body and np.array_equal(a.integers, b.integers) and np.array_equal(a.data, b.data)


def test_frames_arrive_as_they_were_sent_in_both_kinds() -> None:
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
            sender.send_bulk(frame)
        assert all(is_same(frame, receiver.recv()) for frame in frames)
        assert all(is_same(frame, receiver.recv_bulk()) for frame in frames)

    with linked() as (sender, receiver):
        check()


def test_activations_pass_bulk_data_that_its_reader_leaves_unread() -> None:
    with linked() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send_bulk, BIG)  # more than any buffer between them
        for step in range(20):
            sender.send(Frame({"step": step}, data=BIG.data[: 2**20]))
            assert receiver.recv().body == {"step": step}
        assert not sending.done()
        assert is_same(receiver.recv_bulk(), BIG)
        sending.result(10)


def test_two_stages_that_send_at_once_do_not_wait_for_each_other() -> None:
    with linked() as (to_b, from_a), linked() as (to_a, from_b), ThreadPoolExecutor(2) as threads:
        sends = [threads.submit(link.send, BIG) for link in (to_b, to_a)]  # neither reads before it has sent
        for send in sends:
            send.result(10)
        assert is_same(from_a.recv(), BIG) and is_same(from_b.recv(), BIG)


def test_a_sender_whose_reader_stands_still_is_freed_by_close() -> None:
    with linked() as (sender, receiver), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send_bulk, BIG)
        reading = threads.submit(receiver.recv)
        sender.close()
        with pytest.raises(PeerLost):
            sending.result(10)
        with pytest.raises(PeerLost):
            reading.result(10)
        sender.close()


def test_what_came_before_the_end_is_given_out_and_then_the_end_stays() -> None:
    with linked() as (sender, receiver):
        sender.send(Frame({"step": 1}))
        sender.close()
        assert receiver.recv().body == {"step": 1}
        for _ in range(2):
            with pytest.raises(PeerLost, match="hung up"):
                receiver.recv()
        with pytest.raises(PeerLost):
            receiver.recv_bulk()
        with pytest.raises(PeerLost):
            while True:  # the first ones go into buffers of the system
                receiver.send(Frame({}))


def raw_frame(body: bytes = b"{}", num_integers: int = 0, num_data: int = 0, tail: bytes = b"") -> bytes:
    return struct.pack("!IIQ", len(body), num_integers, num_data) + body + tail


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (raw_frame(num_data=100, tail=b"x" * 60), "hung up"),
        (raw_frame()[:7], "hung up"),
        (raw_frame(b"{"), "no JSON"),
        (raw_frame(b"[1]"), "no JSON object"),
        (raw_frame(b"[" * 100000), "no JSON"),
        (raw_frame(b"\xff\xfe"), "no JSON"),
        (raw_frame(num_integers=12, tail=b"x" * 12), "too much"),
        (raw_frame(num_data=101), "too much"),
        (struct.pack("!IIQ", 2**32 - 1, 0, 0), "too much"),
        (raw_frame() * (MAX_UNREAD + 1), "steps ahead"),
    ],
)
def test_a_sender_that_dies_in_mid_message_or_speaks_nonsense_is_lost(sent: bytes, why: str) -> None:
    """The link ends with the reason, after what was whole before it."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(2)]
        receiver = StageLink(pairs[0][0], pairs[1][0], max_data_bytes=100)
        stack.callback(receiver.close)
        for ours in (pairs[0][1], pairs[1][1]):
            stack.callback(ours.close)
        pairs[0][1].sendall(raw_frame(json.dumps({"step": 0}).encode()) + sent)
        pairs[0][1].close()
        receiver._reader.join(10)
        assert receiver.recv().body == {"step": 0}
        with pytest.raises(PeerLost, match=why):
            while True:
                receiver.recv()


# -- who may dial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [replace(KEY, secret=bytes(32)), replace(KEY, number=6), replace(KEY, sender=1)], ids=str
)
def test_another_secret_pipeline_or_stage_is_refused_and_the_right_one_let_in(key: LinkKey) -> None:
    async def run() -> None:
        with listen() as listener:
            address = listener.getsockname()[:2]
            accepting = asyncio.create_task(accept_link(listener, KEY, MAX_DATA_BYTES))
            with pytest.raises(PeerLost, match="does not take this pipeline's secret"):
                await dial_link(*address, key, MAX_DATA_BYTES)
            silent = socket.create_connection(address)  # says nothing
            half = socket.create_connection(address)
            half.sendall(KEY.hello(ACTIVATIONS)[:10])
            sender = await dial_link(*address, KEY, MAX_DATA_BYTES)
            receiver = await accepting
            sender.send(Frame({"step": 1}))
            assert receiver.recv().body == {"step": 1}
            for end in (sender, receiver, silent, half):
                end.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_same_connection_twice_is_none() -> None:
    async def run() -> None:
        with listen() as listener:
            loop, address = asyncio.get_running_loop(), listener.getsockname()[:2]
            accepting = asyncio.create_task(accept_link(listener, KEY, MAX_DATA_BYTES))
            answers = []
            socks = [socket.socket() for _ in range(3)]
            for sock, kind in zip(socks, (BULK, BULK, ACTIVATIONS), strict=True):
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                await loop.sock_sendall(sock, KEY.hello(kind))
                answers.append(await loop.sock_recv(sock, 1))
            assert answers == [b"\x01", b"", b"\x01"]
            (await accepting).close()
            for sock in socks:
                sock.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_nobody_at_the_address_is_one_line_and_waiting_can_be_given_up() -> None:
    async def run() -> None:
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
            for end in await open_link(other):  # the listener is as it was
                end.close()

    asyncio.run(asyncio.wait_for(run(), 20))
