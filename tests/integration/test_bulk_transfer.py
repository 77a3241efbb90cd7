"""Bulk transfers between instances: bytes arrive as they were read, and each fault ends what it concerns, no more."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.bulk_client import BulkClient, BulkItem, Outcome
from floodplain.cluster.bulk_gate import BulkGate
from floodplain.cluster.bulk_server import MAX_PEERS, BulkServer
from floodplain.cluster.bulk_stores import NotServed, ServedStore
from floodplain.cluster.bulk_wire import (
    MAX_REQUEST_INDICES,
    YES,
    BulkRequest,
    compute_digest,
    pack_hello,
    pack_request,
)
from floodplain.cluster.settings import split_address
from floodplain.cluster.stage_frames import Frame, FrameSocket
from floodplain.cluster.stage_link import HELLO_TIMEOUT_S
from floodplain.core.errors import PeerLost
from floodplain.web.listen import bind
from tests.support.bulk import (
    CHUNK_BYTES,
    LOCAL,
    SECRET,
    BlockingStore,
    Cut,
    Received,
    Silence,
    damage,
    expected,
    forge,
    item,
    random_store,
    relaying,
    serving,
)
from tests.support.examples import examples

OK, DAMAGED, MISSING = Outcome.OK, Outcome.DAMAGED, Outcome.MISSING
LONG_S = 60.0
"""A timeout that no test waits for."""
KV = random_store(1)
PARAMETERS = random_store(2, num_pieces=2100, index_bytes=7)
WIDE = random_store(3, num_pieces=3, index_bytes=5 * CHUNK_BYTES)
STORES = {"kv": KV, "parameters": PARAMETERS, "wide": WIDE}


def whole(part: int = 0) -> BulkItem:
    return item("kv", part, *range(40))


def has(wanted: BulkItem) -> bool:
    """Whether the stores have all of an item; an oracle of its own."""
    if not len(wanted.indices):
        return True
    if wanted.store not in STORES or wanted.part > 1:
        return False
    num_pieces = {"kv": 40, "parameters": 2100, "wide": 3}[wanted.store]
    return all(0 <= index < num_pieces for index in wanted.indices)


def test_items_arrive_byte_for_byte_or_are_missing() -> None:
    some = st.lists(st.integers(0, 41), max_size=12) | st.just([*range(2100)]) | st.just([2, 0, 1])
    items = st.builds(
        lambda store, part, indices: item(store, part, *indices),
        st.sampled_from(["kv", "parameters", "wide", "unknown"]),
        st.integers(0, 2),
        some,
    )

    @settings(max_examples=examples(40), deadline=None)
    @given(st.lists(items, max_size=30))
    def check(items: list[BulkItem]) -> None:
        received = Received()
        outcomes = client.fetch(items, received)
        assert outcomes == [OK if has(one) else MISSING for one in items]
        for one in items:
            if has(one) and len(one.indices):
                assert received.of(one) == expected(STORES[one.store], one)

    with serving(**STORES) as server, BulkClient(server.address, SECRET) as client:
        check()


def test_the_sink_learns_which_indices_a_chunk_has() -> None:
    got: dict[int, bytes] = {}

    def write(one: BulkItem, indices: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> None:
        rows = data.reshape(len(indices), KV.index_bytes)
        got.update((int(index), row.tobytes()) for index, row in zip(indices, rows, strict=True))

    with serving(kv=KV) as server, BulkClient(server.address, SECRET) as client:
        assert client.fetch([item("kv", 1, 30, 7, 8, 31, 2)], write) == [OK]
    assert got == {index: KV.piece(1, index).tobytes() for index in (30, 7, 8, 31, 2)}


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_chunk_damages_its_item_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    bad, position = int(random.integers(20, 40)), int(random.integers(0, 1000))  # 20 chunks each; of the second item
    items, received = [whole(0), whole(1), whole(0)], Received()
    with (
        serving(kv=KV) as server,
        relaying(server, lambda number, frame: damage(frame, position) if number == bad else frame) as address,
        BulkClient(address, SECRET) as client,
    ):
        assert client.fetch(items, received) == [OK, DAMAGED, OK]
        assert received.of(items[1]) == expected(KV, items[1])[: (bad - 20) * 2 * KV.index_bytes]  # those before it
        assert client.fetch([whole()], received) == [OK]
    assert received.of(items[0]) == received.of(items[2]) == expected(KV, items[0])


def test_damage_whose_digest_matches_reaches_the_sink() -> None:
    """The control: without its digest, nothing else would have stopped the damaged chunk."""
    one, received = whole(), Received()
    with (
        serving(kv=KV) as server,
        relaying(server, lambda number, frame: forge(damage(frame, 5)) if number == 3 else frame) as address,
        BulkClient(address, SECRET) as client,
    ):
        assert client.fetch([one], received) == [OK]
    assert received.of(one) != expected(KV, one)


@pytest.mark.parametrize(
    "changed",
    [
        {"request": 1},
        {"request": None},
        {"start": 2},
        {"start": -1},
        {"count": 41},
        {"count": 0},
        {"digest": "0"},
    ],
    ids=str,
)
def test_a_peer_that_answers_out_of_order_is_lost(changed: dict[str, object]) -> None:
    received = Received()
    with (
        serving(kv=KV) as server,
        relaying(server, lambda _, frame: replace(frame, body={**frame.body, **changed})) as address,
        BulkClient(address, SECRET) as client,
        pytest.raises(PeerLost),
    ):
        client.fetch([whole()], received)
    assert not received.num_chunks


# -- peers that end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "timeout_s"), [(Cut, LONG_S), (Silence, 1.0)])
def test_a_peer_that_ends_in_mid_transfer_is_lost(end: type[Exception], timeout_s: float) -> None:
    def alter(number: int, frame: Frame) -> Frame:
        if number == 7:
            raise end
        return frame

    received = Received()
    with (
        serving(kv=KV) as server,
        relaying(server, alter) as address,
        BulkClient(address, SECRET, timeout_s) as client,
        pytest.raises(PeerLost),
    ):
        client.fetch([whole()], received)
    assert received.num_chunks == 7


def test_close_ends_a_fetch_and_a_start_that_wait() -> None:
    asked = threading.Event()

    def alter(_: int, frame: Frame) -> Frame:
        asked.set()
        raise Silence

    with ThreadPoolExecutor(2) as threads, bind(LOCAL, 0) as mute, serving(kv=KV) as server:
        mute.listen()
        starting = BulkClient(f"{LOCAL}:{mute.getsockname()[1]}", SECRET, LONG_S)
        start = threads.submit(starting.start)
        with relaying(server, alter) as address, BulkClient(address, SECRET, LONG_S) as client:
            fetch = threads.submit(client.fetch, [whole()], Received())
            assert asked.wait(10)
            client.close()
            with pytest.raises(PeerLost):
                fetch.result(10)
        starting.close()
        with pytest.raises(PeerLost):
            start.result(10)
        with pytest.raises(PeerLost):  # closed before it starts
            starting.start()


def test_a_peer_that_cannot_be_reached_is_one_line() -> None:
    with bind(LOCAL, 0) as deaf:  # does not listen
        for address in ("nonsense", f"{LOCAL}:{deaf.getsockname()[1]}"):
            with pytest.raises(PeerLost, match=f"no bulk data from {address} "):
                BulkClient(address, SECRET).start()


def test_a_closed_server_loses_its_clients() -> None:
    with serving(kv=KV) as server, BulkClient(server.address, SECRET, LONG_S) as client:
        server.close()
        with pytest.raises(PeerLost):
            client.fetch([whole()], Received())
        with pytest.raises(PeerLost):
            BulkClient(server.address, SECRET).start()


# -- who is served -----------------------------------------------------------------------------------------------------


def test_a_secret_opens_connections_until_it_is_revoked() -> None:
    other = bytes(32)
    with serving(kv=KV) as server, BulkClient(server.address, SECRET, LONG_S) as client:
        with pytest.raises(PeerLost, match="no bulk data"):
            BulkClient(server.address, other).start()
        server.admit(other)
        with BulkClient(server.address, other, LONG_S) as second:
            assert second.fetch([whole()], Received()) == [OK]
            server.revoke(other)
            with pytest.raises(PeerLost):
                second.fetch([whole()], Received())
        with pytest.raises(PeerLost, match="no bulk data"):
            BulkClient(server.address, other).start()
        assert client.fetch([whole()], Received()) == [OK]


def test_connections_have_a_limit_and_strangers_take_none_of_it() -> None:
    with serving(kv=KV) as server:
        strangers = [socket.create_connection(split_address(server.address, "")) for _ in range(MAX_PEERS - 1)]
        clients = [BulkClient(server.address, SECRET) for _ in range(MAX_PEERS + 1)]
        for client in clients[:-1]:
            client.start()
        with pytest.raises(PeerLost, match="no bulk data"):
            clients[-1].start()
        for end in (*clients, *strangers):
            end.close()


def test_strangers_have_a_limit() -> None:
    with serving(kv=KV) as server, BulkClient(server.address, SECRET) as client:
        address = split_address(server.address, "")
        strangers = [socket.create_connection(address, timeout=HELLO_TIMEOUT_S / 2) for _ in range(MAX_PEERS + 1)]
        assert strangers[-1].recv(1) == b""  # at once
        assert client.fetch([whole()], Received()) == [OK]
        for stranger in strangers:
            stranger.close()


def raw_client(server: BulkServer) -> FrameSocket:
    """A client that says what a test wants."""
    sock = socket.create_connection(split_address(server.address, ""), timeout=10)
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
def test_a_client_that_asks_nonsense_is_hung_up_on_alone(frame: Frame) -> None:
    with serving(kv=KV) as server, BulkClient(server.address, SECRET) as client:
        raw = raw_client(server)
        with pytest.raises(PeerLost):
            raw.send(frame)
            raw.read()
        raw.close()
        assert client.fetch([whole()], Received()) == [OK]


def test_a_client_that_stops_reading_holds_up_nothing_else() -> None:
    big = random_store(4, num_pieces=MAX_REQUEST_INDICES, index_bytes=2**14)
    with serving(kv=KV, big=big, chunk_bytes=2**18) as server:
        stopped = raw_client(server)
        for number in range(2):  # 64 MiB: more than all buffers between them
            stopped.send(pack_request(BulkRequest(number, "big", 0, np.arange(MAX_REQUEST_INDICES))))
        stopped.read()
        with BulkClient(server.address, SECRET) as client:
            assert client.fetch([whole(), item("big", 0, 7)], Received()) == [OK, OK]
        server.withdraw("big")
        server.close()
        with pytest.raises(PeerLost):  # what is in the buffers, and then the end: the rest was not sent
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
        with BulkClient(server.address, SECRET, LONG_S) as client:
            fetch = threads.submit(client.fetch, [item("slow", 0, *range(40)), whole()], Received())
            assert slow.began.wait(10)
            server.withdraw("kv")  # no read of this one: does not wait
            withdrawal = threads.submit(server.withdraw, "slow")
            with pytest.raises(TimeoutError):
                withdrawal.result(0.05)
            slow.may_end.set()
            withdrawal.result(10)
            assert fetch.result(10) == [MISSING, MISSING]  # its later chunks, and the other store
            server.serve("kv", KV, KV.index_bytes)
            assert client.fetch([whole()], Received()) == [OK]
        server.withdraw("slow")  # none of this name: does nothing


def test_bytes_that_were_read_outlive_their_store() -> None:
    """Chunks are sent after the read has ended, and their memory may be unmapped by then."""
    store = ViewStore(KV.parts[0].copy())
    served, one = ServedStore("view", store, KV.index_bytes), item("view", 0, 0, 1)
    data, view = served.read(0, one.indices), store.read(0, one.indices)
    served.end()
    store.memory[:] = 0
    assert data.tobytes() == expected(KV, item("kv", 0, 0, 1)) != view.tobytes()
    with pytest.raises(NotServed):
        served.read(0, one.indices)


class ViewStore:
    """Gives out its own memory."""

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
        BulkClient(server.address, SECRET, LONG_S) as client,
    ):
        with gate.busy():
            fetch = threads.submit(client.fetch, [whole()], received)
            assert asked.wait(10)
            with pytest.raises(TimeoutError):
                fetch.result(0.05)
            assert not received.num_chunks
        assert fetch.result(10) == [OK]


def test_chunks_go_on_after_the_bound_although_the_stage_is_busy() -> None:
    gate, answers = BulkGate(), list[bool]()
    received = Received()
    with (
        serving(lambda: answers.append(gate.wait(0.001)), kv=KV) as server,
        BulkClient(server.address, SECRET) as client,
    ):
        with gate.busy():
            assert client.fetch([whole()], received) == [OK]
        assert client.fetch([whole()], received) == [OK]
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


def test_a_digest_tells_one_changed_bit_and_another_length() -> None:
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
