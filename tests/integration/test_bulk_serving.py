"""Bulk servers: which clients are served, withdrawn stores, the gate before chunks, and digests."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.bulk.client import BulkClient
from floodplain.cluster.bulk.server import MAX_PEERS, BulkGate, BulkServer, NotServed, ServedStore
from floodplain.cluster.bulk.wire import (
    MAX_REQUEST_INDICES,
    YES,
    BulkRequest,
    compute_digest,
    pack_hello,
    pack_request,
)
from floodplain.cluster.settings import split_address
from floodplain.cluster.wire.frames import Frame, FrameSocket
from floodplain.core.errors import PeerLost
from tests.support.bulk import (
    KV,
    LONG_S,
    SECRET,
    BlockingStore,
    Received,
    connected,
    damage,
    expected,
    item,
    random_store,
    serving,
    whole,
)
from tests.support.examples import examples
from tests.support.waiting import HANG_S

# -- which clients are served ------------------------------------------------------------------------------------------


def test_a_secret_opens_connections_until_it_is_revoked() -> None:
    other = bytes(32)
    with serving(kv=KV) as server, connected(server.address, SECRET, LONG_S) as client:
        with pytest.raises(PeerLost, match="no bulk data"):
            BulkClient(server.address, other).start()
        server.admit(other)
        with connected(server.address, other, LONG_S) as second:
            assert second.fetch([whole()], Received()) == [True]
            server.revoke(other)
            with pytest.raises(PeerLost):
                second.fetch([whole()], Received())
        with pytest.raises(PeerLost, match="no bulk data"):
            BulkClient(server.address, other).start()
        assert client.fetch([whole()], Received()) == [True]


def test_unauthenticated_connections_do_not_count_toward_the_limit() -> None:
    with serving(kv=KV) as server:
        unauthenticated = [socket.create_connection(split_address(server.address, "")) for _ in range(MAX_PEERS - 1)]
        clients = [BulkClient(server.address, SECRET) for _ in range(MAX_PEERS + 1)]
        for client in clients[:-1]:
            client.start()
        with pytest.raises(PeerLost, match="no bulk data"):
            clients[-1].start()
        for end in (*clients, *unauthenticated):
            end.close()


def test_unauthenticated_connections_are_limited() -> None:
    with serving(kv=KV) as server, connected(server.address, SECRET) as client:
        address = split_address(server.address, "")
        unauthenticated = [socket.create_connection(address, timeout=HANG_S / 2) for _ in range(MAX_PEERS + 1)]
        assert unauthenticated[0].recv(1) == b""  # the oldest, before its hello times out
        assert client.fetch([whole()], Received()) == [True]
        for connection in unauthenticated:
            connection.close()


def raw_client(server: BulkServer) -> FrameSocket:
    """A connected client that can send any frame."""
    sock = socket.create_connection(split_address(server.address, ""), timeout=HANG_S)
    sock.sendall(pack_hello(SECRET))
    assert sock.recv(1) == YES
    return FrameSocket(sock, 2**20)


@pytest.mark.parametrize(
    "frame",
    [
        Frame({"request": 0, "store": "kv", "part": 0}),
        Frame({"request": 0, "store": "kv", "part": 0}, np.zeros(MAX_REQUEST_INDICES + 1, dtype=np.int64)),
        Frame({"request": 0, "store": "kv", "part": 0}, np.array([0, -1])),
        Frame({"request": 0, "store": "kv", "part": -1}, np.array([0])),
        Frame({"request": 0, "store": ["kv"], "part": 0}, np.array([0])),
        Frame({"request": 0, "store": "kv", "part": 0}, np.array([0]), np.zeros(1, dtype=np.uint8)),
        Frame({}),
    ],
)
def test_an_invalid_request_closes_only_its_own_connection(frame: Frame) -> None:
    with serving(kv=KV) as server, connected(server.address, SECRET) as client:
        raw = raw_client(server)
        with pytest.raises(PeerLost):
            raw.send(frame)
            raw.read()
        raw.close()
        assert client.fetch([whole()], Received()) == [True]


def test_a_client_that_stops_reading_holds_up_nothing_else() -> None:
    big = random_store(4, num_pieces=MAX_REQUEST_INDICES, index_bytes=2**14)
    with serving(kv=KV, big=big, chunk_bytes=2**18) as server:
        stopped = raw_client(server)
        for number in range(2):  # 64 MiB: more than all buffers on the way
            stopped.send(pack_request(BulkRequest(number, "big", 0, np.arange(MAX_REQUEST_INDICES))))
        stopped.read()
        with connected(server.address, SECRET) as client:
            assert client.fetch([whole(), item("big", 0, 7)], Received()) == [True, True]
        server.withdraw("big")
        server.close()
        with pytest.raises(PeerLost):  # after the buffered chunks: the rest was not sent
            for _ in range(2 * MAX_REQUEST_INDICES // 16):
                stopped.read()
        stopped.close()


def test_a_client_that_does_nothing_is_hung_up_on() -> None:
    with serving(stall_s=0.05, kv=KV) as server:
        idle = raw_client(server)
        with pytest.raises(PeerLost, match="hung up"):
            idle.read()
        idle.close()


# -- withdrawing -------------------------------------------------------------------------------------------------------


def test_withdraw_waits_for_a_read_under_way() -> None:
    slow = BlockingStore(KV.parts, KV.index_bytes)
    with ThreadPoolExecutor(2) as threads, serving(slow=slow, kv=KV) as server:
        with connected(server.address, SECRET, LONG_S) as client:
            fetch = threads.submit(client.fetch, [item("slow", 0, *range(40)), whole()], Received())
            assert slow.began.wait(HANG_S)
            server.withdraw("kv")  # no read of this store: does not wait
            withdrawal = threads.submit(server.withdraw, "slow")
            with pytest.raises(TimeoutError):
                withdrawal.result(0.05)
            slow.may_end.set()
            withdrawal.result(HANG_S)
            assert fetch.result(HANG_S) == [False, False]  # later chunks of "slow", and all of "kv"
            server.serve("kv", KV, KV.index_bytes)
            assert client.fetch([whole()], Received()) == [True]
        server.withdraw("slow")  # no store of this name: does nothing


def test_bytes_that_were_read_outlive_their_store() -> None:
    """A chunk is sent after its read has ended; the store's memory may be unmapped by then."""
    store = ViewStore(KV.parts[0].copy())
    served, one = ServedStore("view", store, KV.index_bytes), item("view", 0, 0, 1)
    data, view = served.read(0, one.indices), store.read(0, one.indices)
    served.end()
    store.memory[:] = 0
    assert data.tobytes() == expected(KV, item("kv", 0, 0, 1)) != view.tobytes()
    with pytest.raises(NotServed):
        served.read(0, one.indices)


class ViewStore:
    """A store whose reads return views of its memory."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory

    def read(self, part: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        return self.memory[: len(indices) * KV.index_bytes]


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_chunks_wait_while_the_stage_is_busy() -> None:
    gate, asked, received = BulkGate(), threading.Event(), Received()

    def wait() -> bool:
        asked.set()
        return gate.wait(LONG_S)

    with (
        ThreadPoolExecutor(1) as threads,
        serving(wait, kv=KV) as server,
        connected(server.address, SECRET, LONG_S) as client,
    ):
        with gate.busy():
            fetch = threads.submit(client.fetch, [whole()], received)
            assert asked.wait(HANG_S)
            with pytest.raises(TimeoutError):
                fetch.result(0.05)
            assert not received.num_chunks
        assert fetch.result(HANG_S) == [True]


def test_chunks_go_on_after_the_bound_although_the_stage_is_busy() -> None:
    gate, answers = BulkGate(), list[bool]()
    received = Received()
    with (
        serving(lambda: answers.append(gate.wait(0.001)), kv=KV) as server,
        connected(server.address, SECRET) as client,
    ):
        with gate.busy():
            assert client.fetch([whole()], received) == [True]
        assert client.fetch([whole()], received) == [True]
    assert answers == [False] * 20 + [True] * 20  # once for each chunk
    assert received.num_chunks == 40


def test_the_gate_opens_when_the_last_holder_lets_go() -> None:
    gate = BulkGate()
    with gate.busy():
        with gate.busy():
            assert not gate.wait(0)
        assert not gate.wait(0)
    assert gate.wait(0)


# -- digests -----------------------------------------------------------------------------------------------------------


def test_a_digest_detects_one_changed_bit_and_another_length() -> None:
    @settings(max_examples=examples(100), deadline=None)
    @given(st.binary(max_size=70), st.integers(0, 10**6))
    def check(text: bytes, position: int) -> None:
        data = np.frombuffer(text, dtype=np.uint8)
        digest = compute_digest(data)
        assert compute_digest(data.copy()) == digest
        assert compute_digest(np.append(data, np.uint8(0))) != digest
        if text:
            assert compute_digest(damage(Frame({}, data=data), position).data) != digest

    check()
