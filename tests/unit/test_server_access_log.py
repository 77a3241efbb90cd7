from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.types import Receive, Scope, Send

from floodplain.server.access_log import MAX_PATH, AnswerWatch
from floodplain.server.counts import RequestCounts
from tests.support.asgi import call

SECRET = "sk-secret"


def log_of(caplog: pytest.LogCaptureFixture, app: Callable[[Scope, Receive, Send], object], path: str = "/v1/x") -> str:
    """The one line of a request to ``app``, which takes a second and a half."""
    times = iter([7.0, 8.5])
    log: Any = AnswerWatch(app, RequestCounts(), is_logged=True, clock=lambda: next(times))  # type: ignore[arg-type]
    headers = [(b"authorization", SECRET.encode())]
    with caplog.at_level(logging.INFO, "floodplain"):
        call(log, f"{path}?{SECRET}", method="POST", headers=headers, body=SECRET.encode())
    (line,) = caplog.messages
    return line


async def answer(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": SECRET.encode()})


async def hang_up(*_: object) -> None: ...


async def fail(*_: object) -> None:
    raise ValueError(SECRET)


async def fail_in_the_middle(_: Scope, receive: Receive, send: Send) -> None:
    await answer(_, receive, send)
    raise ValueError(SECRET)


async def be_cancelled(*_: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("app", "status", "error"),
    [
        (answer, "418", None),
        (hang_up, "-", None),
        (fail, "500", ValueError),
        (fail_in_the_middle, "418", ValueError),
        (be_cancelled, "-", asyncio.CancelledError),
    ],
)
def test_a_line_has_method_path_status_and_duration(
    app: Any, status: str, error: type[BaseException] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with nullcontext() if error is None else pytest.raises(error):
        log_of(caplog, app)
    assert caplog.messages == [f"POST /v1/x {status} 1.500 s"]


def test_a_long_path_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    assert log_of(caplog, answer, "/" * 5000) == f"POST {'/' * MAX_PATH} 418 1.500 s"


@pytest.mark.parametrize("path", ["/x 200 0.001 s", "/x\n\tPOST /y", "/é\x1b[31m", '/a"b'])
def test_a_path_is_one_word(path: str, caplog: pytest.LogCaptureFixture) -> None:
    method, word, *rest = log_of(caplog, answer, path).split()
    assert (method, unquote(word), rest) == ("POST", path, ["418", "1.500", "s"])
    assert word.isascii() and word.isprintable()


def test_other_scopes_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async def check(scope: Scope, *_: object) -> None:
        assert scope == {"type": "lifespan"}

    with caplog.at_level(logging.INFO, "floodplain"):
        watch = AnswerWatch(check, RequestCounts(), is_logged=True)
        asyncio.run(watch({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert caplog.messages == []
