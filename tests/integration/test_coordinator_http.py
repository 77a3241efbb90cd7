"""The coordinator's API over real HTTP: access, answers, and what it reports of itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Response

from floodplain.coordinator import app, service, worker
from floodplain.coordinator.app import MAX_BODY_BYTES
from floodplain.coordinator.tokens import TokenRing
from floodplain.web.errors import ApiError, error_response
from tests.support.coordinators import RunningCoordinator, coordinating, error_of, join, offer, open_store, request, say
from tests.support.hooked_store import HookedStore
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S

JSON = {"Content-Type": "application/json"}
JOIN = b'{"kind": "join", "name": "page", "instance": "i1"}'
TOKENS = "root\nproducer gpu-* lends\nconsumer bob borrows\n"


@pytest.fixture
def store(tmp_path: Path) -> HookedStore:
    return open_store(tmp_path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCoordinator]:
    with coordinating(open_store(tmp_path_factory.mktemp("store"))) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCoordinator]:
    """A coordinator that requires tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    with coordinating(open_store(folder), tokens=TokenRing.from_file(secret_file(folder, TOKENS))) as coordinator:
        yield coordinator


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/leases", "/openapi.json", "/nowhere"])
def test_head_answers_as_get_without_a_body(running: RunningCoordinator, path: str) -> None:
    head, get = httpx.head(running.url + path), httpx.get(running.url + path)
    assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])
    assert head.content == b""


def names_of(running: RunningCoordinator) -> set[str]:
    """Names of all members, living or not."""
    return {row["name"] for row in httpx.get(f"{running.url}/v1/leases").json()["members"]}


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_of_a_batch_are_handled_in_order_one_after_the_other(
    running: RunningCoordinator,
) -> None:
    ask = request("bob", 5)
    hold = {
        "kind": "report", "name": "bob", "lease_id": "bob.1.1.0",
        "stamp": {"generation": 1, "revision": 1}, "event": "hold",
    }  # fmt: skip
    body = say(running, ask, join("ann"), join("bob"), ask, offer("ann"), ask, hold, hold).json()
    assert body["ttl_s"] == 10.0
    outcomes = [reply["outcome"] for reply in body["replies"]]
    assert outcomes == ["deferred", "applied", "applied", "deferred", "applied", "applied", "applied", "stale"]
    assert [lease["state"] for lease in body["replies"][6]["leases"]] == ["held"]
    listing = httpx.get(f"{running.url}/v1/leases").json()
    assert [(row["name"], row["is_living"], row["leased_bytes"]) for row in listing["members"]] == [
        ("ann", True, 5),
        ("bob", True, 0),
    ]
    (lease,) = listing["leases"]
    assert (lease["lease_id"], lease["state"], lease["due_in_s"]) == ("bob.1.1.0", "held", None)
    lost = httpx.delete(f"{running.url}/v1/members/ann").json()
    assert (lost["outcome"], [row["state"] for row in lost["leases"]]) == ("applied", ["lost"])
    assert httpx.get(f"{running.url}/v1/leases").json()["leases"] == []
    unknown = httpx.delete(f"{running.url}/v1/members/nobody").json()
    assert (unknown["outcome"], unknown["detail"]) == ("conflict", "nobody is no member")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "JSON object", None),
        (b"{", "not valid JSON", None),
        (b"[]", "JSON object", None),
        (b"{}", "messages is required", "messages"),
        (b'{"messages": []}', "messages", "messages"),
        (b'{"messages": [{}]}', "messages.0", "messages"),
        (b'{"messages": [{"kind": "quit\\n\\u0000"}]}', "messages.0", "messages"),
        (b'{"messages": [{"kind": "%s"}]}' % (b"x" * 100_000), "messages.0", "messages"),
        (b'{"messages": [{"kind": "join", "name": "a\\n", "instance": "i"}]}', "messages.0.join.name", "messages"),
        (b'{"messages": [{"kind": "join", "name": "a", "instance": "\\ud800"}]}', "not valid JSON", None),
        (b'{"messages": [{"kind": "leave", "name": "a", "generation": 1%s}]}' % (b"0" * 5000), "not valid JSON", None),
        (b'{"messages": [{"kind": "leave", "name": "a", "generation": 1e400}]}', "messages.0.leave", "messages"),
        (b'{"messages": [{"kind": "leave", "name": "a", "generation": 1}], "m\\nore": 1}', "not a supported", "m\nore"),
        (b"[" * 100_000, "not valid JSON", None),
    ],
)
def test_invalid_input_gets_a_400_with_the_problem_in_one_line(
    running: RunningCoordinator, body: bytes, message: str, param: str | None
) -> None:
    response = httpx.post(f"{running.url}/v1/messages", content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/leases", 405),
        ("DELETE", "/v1/members/", 404),
        ("DELETE", "/v1/members/a/b", 404),
        ("DELETE", "/v1/members/a%2Fb", 404),
        ("DELETE", "/v1/members/%00", 400),
        ("DELETE", "/v1/members/a%0A", 400),
        ("DELETE", "/v1/members/" + "a" * 65, 400),
    ],
)
def test_wrong_paths_methods_and_names_have_an_error_body(
    running: RunningCoordinator, method: str, path: str, status: int
) -> None:
    response = httpx.request(method, running.url + path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_path_like_that_of_messages_takes_none(running: RunningCoordinator) -> None:
    body = {"messages": [{"kind": "heartbeat", "name": "a", "generation": 1}]}
    assert httpx.post(f"{running.url}/v1/messages", json=body).status_code == 200
    response = httpx.post(f"{running.url}/v1/messages%0A", json=body)
    assert (response.status_code, error_of(response)["message"]) == (404, "messages are sent to /v1/messages")


# -- access ------------------------------------------------------------------------------------------------------------


def test_requests_without_a_known_token_are_refused(guarded: RunningCoordinator) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "root"}, {"Authorization": "Basic root"}):
        for method, path in (("POST", "messages"), ("GET", "leases"), ("DELETE", "members/a"), ("GET", "nowhere")):
            response = httpx.request(method, f"{guarded.url}/v1/{path}", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    for path in ("/health", "/metrics", "/openapi.json"):
        assert httpx.get(guarded.url + path).status_code == 200


def test_tokens_allow_messages_by_role_and_name_and_batches_as_a_whole(
    guarded: RunningCoordinator,
) -> None:
    ask, put_up = request("bob", 5), offer("gpu-0")
    assert say(guarded, join("gpu-0"), put_up, token="lends").status_code == 200
    assert say(guarded, join("bob"), ask, token="borrows").status_code == 200
    for messages, token, name in (
        ([join("gpu-9"), ask], "lends", "request for bob"),
        ([join("eve")], "borrows", "join for eve"),
        ([join("bob"), put_up, join("eve")], "borrows", "offer for gpu-0"),
    ):
        refused = say(guarded, *messages, token=token)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
        assert error_of(refused)["message"] == f"this token may not say {name}"
    admin = {"Authorization": "Bearer root"}
    members = httpx.get(f"{guarded.url}/v1/leases", headers=admin).json()["members"]
    assert [member["name"] for member in members] == ["bob", "gpu-0"]
    for token in ("lends", "borrows"):
        other = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{guarded.url}/v1/leases", headers=other).status_code == 403
        assert httpx.delete(f"{guarded.url}/v1/members/bob", headers=other).status_code == 403


def test_an_answer_has_each_lease_once_despite_repeated_messages(store: HookedStore) -> None:
    beat = {"kind": "heartbeat", "name": "bob", "generation": 1}
    asks = [request("bob", *[1] * 64, number=number) for number in range(1, 17)]
    with coordinating(store) as running:
        assert say(running, join("ann"), join("bob"), offer("ann", 10**6), *asks).status_code == 200
        again = request("bob", 1)
        once, often = (say(running, *([beat, again] * times)) for times in (1, 500))
    assert [len(reply["leases"]) for reply in once.json()["replies"]] == [1024, 64]
    assert {reply["leases_of"] for reply in often.json()["replies"][2:]} == {0, 1}
    assert len(often.content) < len(once.content) + 1000 * 300


def test_an_answer_of_too_many_leases_is_refused_and_nothing_done(
    store: HookedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_TOLD_LEASES", 5)
    with coordinating(store) as running:
        assert say(running, join("ann"), join("bob"), offer("ann"), request("bob", 1, 1, 1)).status_code == 200
        refused = say(running, join("eve"), join("ann"), join("bob"))
        assert (refused.status_code, error_of(refused)["code"]) == (413, "answer_too_large")
        assert say(running, join("ann")).status_code == say(running, join("bob")).status_code == 200
        members = httpx.get(f"{running.url}/v1/leases").json()["members"]
    assert [member["name"] for member in members] == ["ann", "bob"]


def test_a_consumers_token_cannot_end_a_lender_that_its_pattern_covers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("producer gpu-* lends\nconsumer * borrows\n")
    (tmp_path / "tokens").chmod(0o600)
    leave = {"kind": "leave", "name": "gpu-0", "generation": 1}
    with coordinating(open_store(tmp_path), tokens=TokenRing.from_file(tmp_path / "tokens")) as running:
        assert say(running, join("gpu-0"), token="lends").json()["replies"][0]["member"]["is_lender"]
        (refused,) = say(running, leave, token="borrows").json()["replies"]
        assert (refused["outcome"], refused["member"]) == ("conflict", None)
        assert say(running, leave, token="lends").json()["replies"][0]["outcome"] == "applied"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "wrong_host"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "wrong_host"),
        ({"Origin": "http://evil.example"}, "wrong_origin"),
        ({"Origin": "null"}, "wrong_origin"),
        ({"Origin": "http://127.0.0.1:1"}, "wrong_origin"),
    ],
)
def test_a_page_of_elsewhere_reads_nothing_and_changes_nothing(
    running: RunningCoordinator, headers: dict[str, str], code: str
) -> None:
    say(running, join("victim"))
    body = {"messages": [join("evil"), {"kind": "leave", "name": "victim", "generation": 1}]}
    paths = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/leases"), ("GET", "/openapi.json"), ("GET", "/none")]
    for method, path in [("POST", "/v1/messages"), ("DELETE", "/v1/members/victim"), *paths]:
        json = body if method == "POST" else None
        response = httpx.request(method, running.url + path, json=json, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (403, code)
    assert names_of(running) >= {"victim"} and "evil" not in names_of(running)


@pytest.mark.parametrize(
    "kinds", [[], ["text/plain"], ["text/plain; application/json"], ["application/json", "text/plain"], ["multipart/x"]]
)
def test_a_body_of_another_type_changes_nothing(running: RunningCoordinator, kinds: list[str]) -> None:
    headers = [("Content-Type", kind) for kind in kinds]
    content = b'{"messages": [%s]}' % JOIN.replace(b"page", b"form")
    response = httpx.post(f"{running.url}/v1/messages", content=content, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert "form" not in names_of(running)


def test_json_may_name_its_charset_and_its_own_origin(running: RunningCoordinator) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Origin": running.url}
    response = httpx.post(f"{running.url}/v1/messages", content=b'{"messages": [%s]}' % JOIN, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "wide",
    [
        {f"f{i}": 1 for i in range(9000)},
        {"messages": [{"kind": "join", **{f"f{i}": 1 for i in range(9000)}}]},
        {"messages": [{"kind": "offer", "stamp": {f"f{i}": 1 for i in range(9000)}}]},
        {"messages": [{"kind": "request", "shards": [{f"f{i}": 1 for i in range(9000)}]}]},
        {"messages": [{"kind": "join"}] * 9000},
        {"messages": [{"kind": "request", "shards": [{"a": 1}] * 64}] * 300},
    ],
)
def test_a_batch_of_many_faults_becomes_a_few_errors(
    running: RunningCoordinator, wide: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many faults a body has, at most 16 become errors on the event loop."""
    found: list[int] = []

    def count(error: Any, *headers: Any) -> Response:
        found.append(1 if isinstance(error, ApiError) else len(error.errors()))
        return error_response(error, *headers)

    monkeypatch.setattr(app, "error_response", count)
    response = httpx.post(f"{running.url}/v1/messages", json=wide)
    assert response.status_code == 400 and error_of(response)
    assert 0 < sum(found) <= 16


@pytest.mark.parametrize(("number", "is_long"), [(1, False), (1000, True)])
def test_long_batches_are_neither_read_nor_answered_on_the_event_loop(
    running: RunningCoordinator, number: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, str] = {}

    def noting(module: Any, name: str) -> None:
        work = getattr(module, name)

        def noted(*given: Any) -> Any:
            threads[name] = threading.current_thread().name
            return work(*given)

        monkeypatch.setattr(module, name, noted)

    noting(app, "parse_model")
    noting(app, "encode_replies")
    assert say(running, *[{"kind": "heartbeat", "name": "ann", "generation": 9}] * number).status_code == 200
    helpers = {"parse_model": "json-0", "encode_replies": "answers-0"}
    assert {name: threads[name] == helpers[name] for name in threads} == dict.fromkeys(helpers, is_long)


def test_a_body_that_is_too_large_is_not_read(running: RunningCoordinator) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as sock:
        head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")
    chunks = (b" " * 2**18 for _ in range(MAX_BODY_BYTES // 2**18 + 2))
    response = httpx.post(f"{running.url}/v1/messages", content=chunks, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


def test_when_too_many_wait_the_next_gets_a_429_with_retry_after(
    running: RunningCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING", 0)
    response = say(running, join("ann"))
    assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "1"


# -- what it reports of itself -----------------------------------------------------------------------------------------


def test_the_openapi_document_has_every_kind_of_answer(running: RunningCoordinator) -> None:
    """``test_coordinator_fuzz`` has its paths."""
    document = httpx.get(f"{running.url}/openapi.json").json()
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        answers = operation["responses"]
        assert {"200", "400", "401", "403", "404", "413", "429", "503", "default"} <= set(answers)
        assert "422" not in answers
    kinds = document["components"]["schemas"]["MessageBatch"]["properties"]["messages"]["items"]["discriminator"]
    assert set(kinds["mapping"]) == {
        "join", "leave", "heartbeat", "offer", "recall", "observe", "request", "report",
    }  # fmt: skip


def test_metrics_count_what_happened(store: HookedStore) -> None:
    with coordinating(store) as running:
        messages = join("ann"), join("bob"), offer("ann"), offer("ann"), request("bob", 5)
        assert say(running, *messages).status_code == 200
        text = httpx.get(f"{running.url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    own = "floodplain_coordinator_"
    found = {name.removeprefix(own): float(value) for name, value in samples.items() if name.startswith(own)}
    assert found.pop("transaction_seconds_total") > 0
    assert found.pop("transactions_total") >= 1
    assert {key: value for key, value in found.items() if value} == {
        "leading": 1,
        'members{state="living"}': 2,
        "offered_bytes": 8,
        'leases{state="granted"}': 1,
        'leased_bytes{state="granted"}': 5,
        'messages_total{kind="join",outcome="applied"}': 2,
        'messages_total{kind="offer",outcome="applied"}': 1,
        'messages_total{kind="offer",outcome="stale"}': 1,
        'messages_total{kind="request",outcome="applied"}': 1,
        "takeovers_total": 1,
    }


def test_the_documentation_has_exactly_the_metrics_that_there_are(running: RunningCoordinator) -> None:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    shown = {(line.split()[2], line.split()[3]) for line in lines if line.startswith("# TYPE floodplain_coordinator")}
    assert "floodplain_build_info" in "".join(lines)
    assert "process_cpu_seconds_total" in "".join(lines)
    section = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## The coordinator")[2]
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    documented = {
        ("floodplain_coordinator_" + row[4].strip(" `").partition("{")[0], row[3].strip()) for row in rows[1:]
    }
    assert shown == documented
