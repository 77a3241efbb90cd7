"""Bulk transfers between instances: bytes arrive unchanged, and a fault ends only its own item or connection."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.bulk.client import BulkClient, BulkItem
from floodplain.cluster.bulk.kv_copies import Puller, RequestCopy
from floodplain.cluster.wire.frames import Frame
from floodplain.core.errors import PeerLost
from floodplain.web.address import bind
from tests.support.bulk import (
    KV,
    LOCAL,
    LONG_S,
    SECRET,
    STORES,
    Cut,
    Received,
    Silence,
    connected,
    damage,
    expected,
    forge,
    item,
    relaying,
    serving,
    whole,
)
from tests.support.examples import examples
from tests.support.waiting import HANG_S


def has(wanted: BulkItem) -> bool:
    """Whether the stores have all of an item; independent of the code under test."""
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
        assert outcomes == [has(one) for one in items]
        for one in items:
            if has(one) and len(one.indices):
                assert received.of(one) == expected(STORES[one.store], one)

    with serving(**STORES) as server, connected(server.address, SECRET) as client:
        check()


def test_the_sink_learns_which_indices_a_chunk_has() -> None:
    got: dict[int, bytes] = {}

    def write(one: BulkItem, indices: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> None:
        rows = data.reshape(len(indices), KV.index_bytes)
        got.update((int(index), row.tobytes()) for index, row in zip(indices, rows, strict=True))

    with serving(kv=KV) as server, connected(server.address, SECRET) as client:
        assert client.fetch([item("kv", 1, 30, 7, 8, 31, 2)], write) == [True]
    assert got == {index: KV.piece(1, index).tobytes() for index in (30, 7, 8, 31, 2)}


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_chunk_damages_its_item_alone(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    random = np.random.default_rng(seed)
    bad, position = int(random.integers(20, 40)), int(random.integers(0, 1000))  # a chunk of the second item; 20 each
    items, received = [whole(0), whole(1), whole(0)], Received()
    with (
        serving(kv=KV) as server,
        relaying(server, lambda number, frame: damage(frame, position) if number == bad else frame) as address,
        connected(address, SECRET) as client,
    ):
        assert client.fetch(items, received) == [True, False, True]
        assert received.of(items[1]) == expected(KV, items[1])[: (bad - 20) * 2 * KV.index_bytes]  # chunks before it
        assert "part 1 of 'kv' is damaged: " in caplog.text
        assert client.fetch([whole()], received) == [True]
    assert received.of(items[0]) == received.of(items[2]) == expected(KV, items[0])


def test_damage_whose_digest_matches_reaches_the_sink() -> None:
    """Negative control: only the digest stops a damaged chunk."""
    one, received = whole(), Received()
    with (
        serving(kv=KV) as server,
        relaying(server, lambda number, frame: forge(damage(frame, 5)) if number == 3 else frame) as address,
        connected(address, SECRET) as client,
    ):
        assert client.fetch([one], received) == [True]
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
        connected(address, SECRET) as client,
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
        connected(address, SECRET, timeout_s) as client,
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
        with relaying(server, alter) as address, connected(address, SECRET, LONG_S) as client:
            fetch = threads.submit(client.fetch, [whole()], Received())
            assert asked.wait(HANG_S)
            client.close()
            with pytest.raises(PeerLost):
                fetch.result(HANG_S)
        starting.close()
        with pytest.raises(PeerLost):
            start.result(HANG_S)
        with pytest.raises(PeerLost):  # a closed client cannot start
            starting.start()


def test_a_peer_that_cannot_be_reached_is_one_line() -> None:
    with bind(LOCAL, 0) as deaf:  # does not listen
        for address in ("nonsense", f"{LOCAL}:{deaf.getsockname()[1]}"):
            with pytest.raises(PeerLost, match=f"no bulk data from {address} "):
                BulkClient(address, SECRET).start()


def test_a_thread_that_does_not_start_costs_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving(kv=KV) as server:
        with monkeypatch.context() as patched, pytest.raises(PeerLost):
            patched.setattr(threading.Thread, "start", refuse)
            BulkClient(server.address, SECRET, LONG_S).start()
        with connected(server.address, SECRET) as client:
            assert client.fetch([whole()], Received()) == [True]


def test_a_closed_server_loses_its_clients() -> None:
    with serving(kv=KV) as server, connected(server.address, SECRET, LONG_S) as client:
        server.close()
        with pytest.raises(PeerLost):
            client.fetch([whole()], Received())
        with pytest.raises(PeerLost):
            BulkClient(server.address, SECRET).start()


def test_a_copy_that_is_ended_here_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As when a request that moves is aborted by its client."""
    puller, listener = Puller(SECRET), bind("127.0.0.1", 0)
    listener.listen()
    host, port = listener.getsockname()
    with listener, ThreadPoolExecutor(1) as threads:
        copying = threads.submit(puller.copy, RequestCopy((0,), (0,), {f"{host}:{port}": [0]}), lambda *_: True)
        peer, _ = listener.accept()
        puller.close()
        assert not copying.result(HANG_S)
        peer.close()
    assert not caplog.records
