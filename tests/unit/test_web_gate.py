from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from floodplain.web.bearer import SecretRing
from floodplain.web.errors import ApiError
from floodplain.web.gate import CLIENT_SCOPE_KEY, BodyBudget, DrainSwitch, Gate
from floodplain.web.origin import LOOPBACK_ONLY
from tests.support.asgi import call

MEMBERS = SecretRing({"7": 7, "0": 0})


def ask(
    path: str, authorization: bytes = b"", *, secrets: SecretRing[int] | None = MEMBERS, is_draining: bool = False
) -> tuple[Message, Any]:
    """The head of the answer, and the client that the application behind the gate got."""
    clients: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        clients.append(scope.get(CLIENT_SCOPE_KEY, "anybody"))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    drain = DrainSwitch()
    drain.is_draining = is_draining
    headers = [(b"authorization", b"Bearer " + authorization)]
    head = call(Gate(app, drain, secrets, max_body_bytes=9), path, headers=headers)[0]
    return head, clients[0] if clients else None


@pytest.mark.parametrize(
    ("path", "authorization", "answer"),
    [
        ("/v1/leases", b"7", (200, 7)),
        ("/v1/leases", b"0", (200, 0)),
        ("/v1/leases", b"x", (401, None)),
        ("/", b"", (200, "anybody")),
        ("/page/main.js", b"", (200, "anybody")),
        ("/page", b"", (401, None)),
        ("/live", b"", (401, None)),
        ("/v1/leases", b"", (401, None)),
        ("/instances", b"", (401, None)),
        ("/instances", b"7", (200, 7)),
        ("/v1", b"", (401, None)),
        ("//health", b"", (401, None)),
        ("/health/", b"", (401, None)),
        *[(path, b"x", (200, "anybody")) for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json")],
    ],
)
def test_a_secret_decides_access_and_identity(path: str, authorization: bytes, answer: tuple[int, Any]) -> None:
    head, client = ask(path, authorization)
    assert (head["status"], client) == answer


def test_without_secrets_all_requests_are_let_in() -> None:
    head, client = ask("/v1/leases", b"x", secrets=None)
    assert (head["status"], client) == (200, "anybody")


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/leases", 503), ("/health", 503), ("/ready", 503), ("/version", 200)]
)
def test_while_the_service_drains_it_is_unwell_and_takes_nothing(path: str, status: int) -> None:
    assert ask(path, b"7", is_draining=True)[0]["status"] == status


@pytest.mark.parametrize("is_draining", [False, True])
@pytest.mark.parametrize("path", ["/v1/leases", "/version"])
def test_an_answer_of_a_draining_service_is_the_last_of_its_connection(path: str, is_draining: bool) -> None:
    head, _ = ask(path, b"7", is_draining=is_draining)
    assert ((b"connection", b"close") in head["headers"]) is is_draining


def test_a_request_under_another_name_is_refused_like_any_other() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the request was let in")

    headers = [(b"host", b"evil.example"), (b"x-request-id", b"q-1")]
    head = call(Gate(app, DrainSwitch(), MEMBERS, 9, LOOPBACK_ONLY), "/health", headers=headers)[0]
    assert (head["status"], dict(head["headers"])[b"x-request-id"]) == (403, b"q-1")


bodies = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 6)), max_size=30)


@given(bodies)
def test_held_bodies_are_bounded_and_forgotten_when_their_requests_end(pieces: list[tuple[int, int]]) -> None:
    """Pieces of eight bodies; one that is refused, or that gets a piece of 0 bytes, ends."""
    budget, held = BodyBudget(10, max_held_bytes=25), dict[int, int]()
    running: dict[int, tuple[ExitStack, Receive]] = {}

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(num_bytes)}

    for number, num_bytes in pieces:
        if number not in running:
            stack = ExitStack()
            running[number] = stack, stack.enter_context(budget.hold(receive))
        held[number] = held.get(number, 0) + num_bytes
        expected = 413 if held[number] > 10 else 503 if sum(held.values()) > 25 else None
        status = None
        try:
            asyncio.run(running[number][1]())  # type: ignore[arg-type]
        except ApiError as refusal:
            status = refusal.status_code
        assert status == expected
        if status or not num_bytes:
            running.pop(number)[0].close()
            del held[number]
        assert budget.num_held_bytes == sum(held.values()) <= 25


def test_a_gate_forgets_the_body_of_a_request_that_failed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise KeyError

    gate = Gate(app, DrainSwitch(), None, max_body_bytes=9)
    for _ in range(3):
        with pytest.raises(KeyError):
            call(gate, method="POST", body=b"12345")
    assert gate._budget.num_held_bytes == 0
