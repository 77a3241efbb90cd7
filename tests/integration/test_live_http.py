"""The live page over real HTTP: who may see it, what it must not do, and its data from a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from floodplain.coordinator.tokens import TokenRing
from floodplain.live.changes import Snapshot, apply
from floodplain.live.routes import HEADERS, page_files
from floodplain.server.auth import KeyRing
from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.coordinators import RunningCoordinator, coordinating, join, open_store, say
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S, wait_until

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer open-sesame"}
BURST = "/live/burst"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = KeyRing.from_file(secret_file(tmp_path_factory.mktemp("keys"), "alice open-sesame\n"))
    with serving(FakeEngine(), keys=keys) as running:
        yield running


def first(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The first message of a feed."""
    with httpx.stream("GET", f"{url}/live", headers=headers, timeout=HANG_S) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert "no-transform" in answer.headers["cache-control"], "a proxy that compresses holds events back"
        text = ""
        for part in answer.iter_text():
            text += part
            if "\n\n" in text:
                break
    message: dict[str, Any] = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    return message


def test_the_page_loads_only_its_own_files(server: RunningServer) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert {name: page.headers[name] for name in HEADERS} == HEADERS
    with httpx.Client(base_url=f"{server.url}/page/") as client:
        for name, content in page_files().items():
            answer = client.get(name)
            assert answer.content == content and answer.headers["content-security-policy"]
            text = content.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text and "innerHTML" not in text
        assert client.get("secret.txt").status_code == 404


def test_the_feed_begins_with_the_whole_state(server: RunningServer) -> None:
    message = first(server.url)
    now = apply(Snapshot({}), message)
    assert now.head["model"] == "fake" and now.head["can_burst"] is True
    assert now.head["memory"]["pool"] == 7 * 2**20 and len(now.rows) == 2


def test_head_of_the_feed_ends(server: RunningServer) -> None:
    with httpx.Client() as client:  # keeps the connection open: the answer must end by itself
        assert client.head(f"{server.url}/live").headers["content-type"].startswith("text/event-stream")
        wait_until(lambda: server.num_requests == 0)


def test_with_keys_the_page_is_public_and_its_data_are_not(locked: RunningServer) -> None:
    assert httpx.get(locked.url).status_code == 200
    assert httpx.get(f"{locked.url}/page/main.js").status_code == 200
    assert httpx.get(f"{locked.url}/live").status_code == 401
    assert httpx.post(f"{locked.url}{BURST}", json={}).status_code == 401
    assert first(locked.url, KEY)["type"] == "whole"


def test_no_page_serves_none_of_it() -> None:
    with serving(FakeEngine(), config=ServerConfig(page=False)) as running:
        for path in ("/", "/page/main.js", "/live"):
            assert httpx.get(running.url + path).status_code == 404
        assert httpx.post(f"{running.url}{BURST}", json={}).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 400),
    ],
)
def test_pages_of_other_sites_can_start_no_burst(server: RunningServer, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(f"{server.url}{BURST}", content="{}", headers=JSON | headers)
    assert answer.status_code in (status, 415) and answer.status_code != 200
    assert server.engine.submitted.empty()


def test_other_sites_cannot_read_the_data_of_a_server_without_keys(server: RunningServer) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert httpx.get(f"{server.url}/live", headers=headers).status_code == 403


def test_a_burst_sends_its_requests_and_one_runs_at_a_time() -> None:
    engine = FakeEngine(num_free_tokens=1)
    with serving(engine, drain_timeout_s=0.0) as running:
        origin = {"Origin": running.url}
        assert httpx.post(f"{running.url}{BURST}", json={"requests": 3}, headers=origin).json() == {"requests": 3}
        requests = [engine.submitted.get(timeout=HANG_S) for _ in range(3)]
        assert all(max(request.prompt_token_ids) < engine.vocab_size for request in requests)
        assert httpx.post(f"{running.url}{BURST}", json={"requests": 3}).status_code == 409
        assert httpx.post(f"{running.url}{BURST}", json={"requests": 0}).status_code == 400


def test_a_server_that_others_reach_has_no_button(tmp_path: Path) -> None:
    keys = KeyRing.from_file(secret_file(tmp_path, "open-sesame\n"))
    with serving(FakeEngine(), keys=keys, config=ServerConfig(host="0.0.0.0")) as running:
        assert first(running.url, KEY)["head"]["can_burst"] is False
        assert httpx.post(f"{running.url}{BURST}", json={}, headers=KEY).status_code == 404


def test_listeners_do_not_delay_the_end_of_a_server() -> None:
    with serving(FakeEngine()) as running, httpx.stream("GET", f"{running.url}/live", timeout=HANG_S) as answer:
        parts = answer.iter_raw()
        next(parts)
        running.stop()
        assert b"".join(parts) is not None  # the stream ends by itself
        running.join()


# -- the coordinator ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCoordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    tokens = TokenRing.from_file(secret_file(folder, "root\nproducer gpu-* lends\n"))
    with coordinating(open_store(folder), tokens=tokens) as running:
        offer = {"kind": "offer", "name": "ann", "stamp": {"generation": 1, "revision": 1}, "offered_bytes": 8}
        request = {"kind": "request", "name": "bob", "generation": 1, "number": 1, "shards": [{"num_bytes": 5}]}
        recall = {"kind": "recall", "name": "ann", "stamp": {"generation": 1, "revision": 2}, "num_bytes": 5}
        assert say(running, join("ann"), join("bob"), offer, request, token="root").status_code == 200
        assert say(running, {**recall, "deadline_s": 100.0}, token="root").status_code == 200
        yield running


def test_a_coordinators_feed_shows_members_and_recalls(coordinator: RunningCoordinator) -> None:
    head = first(coordinator.url, {"Authorization": "Bearer root"})["head"]
    assert (head["service"], head["role"]) == ("coordinator", "leading")
    assert head["counts"] == {"members": 2, "leases": 1}
    (lease,) = head["leases"]
    assert (lease["from"], lease["to"], lease["bytes"]) == ("ann", "bob", 5)
    assert 0 < lease["due_in_s"] <= 100
    assert {(one["name"], one["lent"], one["borrowed"]) for one in head["members"]} == {("ann", 5, 0), ("bob", 0, 5)}


def test_a_coordinators_data_need_an_admins_token(coordinator: RunningCoordinator) -> None:
    assert httpx.get(coordinator.url).status_code == 200
    assert httpx.get(f"{coordinator.url}/live").status_code == 401
    assert httpx.get(f"{coordinator.url}/live", headers={"Authorization": "Bearer lends"}).status_code == 403
    assert httpx.get(coordinator.url, headers={"Host": "evil.example"}).status_code == 403
