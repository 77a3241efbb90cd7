"""Coordinators over real HTTP: one that stands by, one whose store fails, one that is stopped, and one that fails."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from floodplain.coordinator import worker
from floodplain.coordinator.store import StoreError
from floodplain.coordinator.worker import LEADER_HEADER
from floodplain.core.errors import InvariantError
from tests.support.coordinators import RunningCoordinator, coordinating, error_of, join, open_store, say
from tests.support.hooked_store import HookedStore, let_pass
from tests.support.waiting import HANG_S, wait_until

JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> HookedStore:
    return open_store(tmp_path)


# -- leadership --------------------------------------------------------------------------------------------------------


def test_a_standby_names_the_leader_and_takes_over_when_it_ends(tmp_path: Path) -> None:
    with coordinating(open_store(tmp_path)) as leader, coordinating(open_store(tmp_path), leads=False) as standby:
        assert say(leader, join("ann")).status_code == 200
        wait_until(lambda: standby.service.leader_url == leader.url)
        for response in (say(standby, join("bob")), httpx.get(f"{standby.url}/v1/leases")):
            assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
            assert error_of(response)["message"] == f"another coordinator leads: ask that one ({leader.url})"
            assert (response.headers[LEADER_HEADER], response.headers["retry-after"]) == (leader.url, "1")
        health = [httpx.get(f"{each.url}/health").json() for each in (leader, standby)]
        assert health == [
            {"status": "ok", "role": "leading", "leader_url": leader.url},
            {"status": "ok", "role": "standing by", "leader_url": leader.url},
        ]
        assert "floodplain_coordinator_leading 0.0" in httpx.get(f"{standby.url}/metrics").text
        leader.stop()
        leader.join()
        wait_until(lambda: standby.service.is_leading)
        assert [row["name"] for row in httpx.get(f"{standby.url}/v1/leases").json()["members"]] == ["ann"]


def test_with_a_failing_store_messages_get_503_and_the_process_is_healthy(store: HookedStore) -> None:
    def fail(moment: str) -> None:
        raise StoreError(moment, None, ConnectionError("the disk is full"))

    with coordinating(store) as running:
        store.hook = fail
        wait_until(lambda: not running.service.is_leading)
        response = say(running, join("ann"))
        assert response.status_code == 503
        assert error_of(response)["message"] == "the store does not answer: the disk is full"
        assert httpx.get(f"{running.url}/health").json()["role"] == "standing by"
        assert httpx.get(f"{running.url}/metrics").status_code == 200
        store.hook = let_pass
        wait_until(lambda: running.service.is_leading)
        assert say(running, join("ann")).status_code == 200


# -- how it ends -------------------------------------------------------------------------------------------------------


@contextmanager
def stalled(store: HookedStore) -> Iterator[threading.Event]:
    """Block the store at its next write until the event is set."""
    is_stalled, may_go_on = threading.Event(), threading.Event()

    def hook(moment: str) -> None:
        if moment == "before write":
            is_stalled.set()
            may_go_on.wait()

    store.hook = hook
    assert is_stalled.wait(HANG_S)
    try:
        yield may_go_on
    finally:
        may_go_on.set()


@contextmanager
def asking(running: RunningCoordinator, *messages: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A connection on which ``messages`` were sent and nothing was read."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=HANG_S)
    try:
        connection.request("POST", "/v1/messages", json.dumps({"messages": messages}), JSON)
        yield connection
    finally:
        connection.close()


def test_a_stopped_leader_answers_waiting_messages_and_another_leads(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with coordinating(store) as running, coordinating(open_store(tmp_path), leads=False) as standby:
        with stalled(store) as may_go_on, asking(running, join("ann")) as first, asking(running, join("bob")) as second:
            wait_until(lambda: running.server._worker.num_waiting == 2)
            running.stop()
            may_go_on.set()
            assert [each.getresponse().status for each in (first, second)] == [200, 200]
        running.join()
        with pytest.raises(httpx.ConnectError):
            say(running, join("eve"))
        wait_until(lambda: standby.service.is_leading)
        listing = httpx.get(f"{standby.url}/v1/leases").json()
        assert [row["name"] for row in listing["members"]] == ["ann", "bob"]


def test_a_store_that_hangs_does_not_keep_a_coordinator_from_ending(
    store: HookedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CLOSING_S", 0.1)
    with coordinating(store) as running, stalled(store):
        running.stop()
        running.join()


def test_a_client_that_disconnects_does_not_block_other_answers(store: HookedStore) -> None:
    with coordinating(store) as running:
        with stalled(store) as may_go_on, asking(running, join("ann")) as gone, asking(running, join("bob")) as other:
            wait_until(lambda: running.server._worker.num_waiting == 2)
            gone.close()
            may_go_on.set()
            assert other.getresponse().status == 200
        assert len(httpx.get(f"{running.url}/v1/leases").json()["members"]) == 2


def test_a_failed_coordinator_answers_all_waiting_clients_and_exits(store: HookedStore) -> None:
    def fail(moment: str) -> None:
        if moment == "before write":
            raise InvariantError("a byte is leased twice")

    with coordinating(store) as running:
        with stalled(store) as may_go_on, asking(running, join("ann")) as first, asking(running, join("bob")) as second:
            wait_until(lambda: running.server._worker.num_waiting == 2)
            store.hook = fail
            may_go_on.set()
            for each in (first, second):
                response = each.getresponse()
                assert response.status == 503
                assert "has failed" in json.load(response)["error"]["message"]
        running.join()
        assert isinstance(running.failure, InvariantError)
        assert store.look().leader == ""
