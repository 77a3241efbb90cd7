"""Priorities under the ceiling of an API key, over HTTP: refused, or passed to the engine unchanged.

``Client.priority`` decides which priority a key allows (``tests/unit/test_server_auth.py``). Here: both endpoints
call it, for whole answers and for streams, and no refused request reaches the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from floodplain.server.auth import KeyRing
from tests.fakes.engine import FakeEngine, RunningServer, serving
from tests.support.secret_files import secret_file
from tests.support.waiting import HANG_S

KEYS = "ops secret-of-ops -5\nann secret-of-ann\nbatch secret-of-batch 3\n"
"""A line with a negative ceiling, one with none, and one with a positive."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
}

WAYS = [(path, stream) for path in BODIES for stream in (False, True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = secret_file(tmp_path_factory.mktemp("keys"), KEYS)
    with serving(FakeEngine(), keys=KeyRing.from_file(path)) as running:
        yield running


def ask(server: RunningServer, name: str | None, path: str, **fields: object) -> httpx.Response:
    """Send a body with the key of ``name``, or without a key if that is None."""
    headers = {"Authorization": f"Bearer secret-of-{name}"} if name else {}
    return httpx.post(server.url + path, json=BODIES[path] | fields, headers=headers)


def reached(server: RunningServer, num_requests: int = 1) -> list[tuple[object, object]]:
    """(client, priority) of all requests at the engine, which are ``num_requests``."""
    requests = [server.engine.submitted.get(timeout=HANG_S) for _ in range(num_requests)]
    assert server.engine.submitted.empty()
    return [(request.client, request.priority) for request in requests]


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_a_priority_beyond_the_ceiling_is_refused_before_the_engine(
    server: RunningServer, path: str, stream: bool
) -> None:
    for name, asked, ceiling in (("ops", -6, -5), ("ann", -1, 0), ("batch", 2, 3)):
        response = ask(server, name, path, stream=stream, priority=asked)
        assert response.status_code == 400
        told = f"priority {asked} is beyond this API key's ceiling: send {ceiling} or more"
        assert response.json()["error"]["message"] == told
    assert server.engine.submitted.empty()


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_other_priorities_reach_the_engine_as_they_are(server: RunningServer, path: str, stream: bool) -> None:
    """Without one it is 0, or the ceiling if that is later: a better ceiling is only a permission."""
    for name, asked, given in (("ops", -5, -5), ("batch", 2**62, 2**62), ("ops", None, 0), ("batch", None, 3)):
        assert ask(server, name, path, stream=stream, priority=asked).status_code == 200
        assert reached(server) == [(name, given)]


def test_all_prompts_of_one_body_have_its_priority(server: RunningServer) -> None:
    assert ask(server, "ops", "/v1/completions", prompt=["abc", "de", "f"], priority=-3).status_code == 200
    assert reached(server, 3) == 3 * [("ops", -3)]


def test_without_keys_the_ceiling_of_all_requests_is_0() -> None:
    """All users of a server without keys are one client."""
    with serving(FakeEngine()) as running:
        assert ask(running, None, "/v1/completions", priority=-1).status_code == 400
        assert ask(running, None, "/v1/completions", priority=4).status_code == 200
        assert reached(running) == [("", 4)]
