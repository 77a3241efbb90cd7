"""Our HTTP client against hostile servers: one line of error, within bounds, and no redirect is followed."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import pytest

from floodplain.cli.main import main
from floodplain.core.errors import UserError
from floodplain.web.client import Answer, AnswerLimits, HttpClient, NoAnswer, NoServer
from floodplain.workload.client import run_load
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptForm
from floodplain.workload.records import LoadRequest, RequestRecord
from tests.support.fake_server import STREAM_HEAD, Asked, Handler, chunk, pouring, saying, serving, streaming, whole
from tests.support.waiting import HANG_S

T = TypeVar("T")

A = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"text": "b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}\n\n'
SOON, SMALL = AnswerLimits(total_s=0.2), AnswerLimits(max_bytes=1000)
PLAIN = b"HTTP/1.1 200 OK\r\n\r\n"


def against(handle: Handler, use: Callable[[str], Awaitable[T]]) -> T:
    async def story() -> T:
        async with serving(handle) as url:
            return await use(url)

    return asyncio.run(story())


def ask(handle: Handler, limits: AnswerLimits = SMALL) -> Answer:
    return against(handle, lambda url: HttpClient(url).ask("/x", limits=limits))


def send(handle: Handler, num_requests: int = 1, **options: Any) -> list[RequestRecord]:
    """Send requests one by one."""
    requests = [
        LoadRequest(request_id=f"r{i}", arrival_s=0.0, prompt=None, prompt_token_ids=(104, 105), max_tokens=4)
        for i in range(num_requests)
    ]

    async def load(url: str) -> list[RequestRecord]:
        return await run_load(HttpTarget(url, "m", **options), requests, progress=False, max_concurrency=1)

    return against(handle, load)


def test_an_answer_of_exactly_the_bound_is_whole() -> None:
    assert ask(saying(whole(200, b"x" * 1000))).text == "x" * 1000
    assert ask(saying(whole(404, b""))).status == 404


@pytest.mark.parametrize(
    ("handle", "needle"),
    [
        (saying(whole(200, b"x" * 1001)), "more than 1000 bytes"),
        (saying(whole(200, b"")[:-2], b"Content-Length: 99999999999999999999999\r\n\r\n"), ""),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"), ""),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), ""),
        (pouring(PLAIN, b"x" * 4096), "more than 1000 bytes"),
        (pouring(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 1000), ""),
        (pouring(b"HTTP/1.1 200 OK\r\nA: ", b"x" * 4096), ""),
        (pouring(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "within 0.2 s"),
        (pouring(STREAM_HEAD + b"0\r\n", b"A: b\r\n" * 1000), ""),
        (pouring(STREAM_HEAD, b"1;" + b"a" * 4096), ""),
        (saying(STREAM_HEAD, b"zz\r\n"), ""),
        (saying(b"SSH-2.0-x\r\n"), ""),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"), "without sending complete message body"),
        (saying(), "disconnected"),
        (saying(whole(200, gzip.compress(b"x" * 10**6), b"Content-Encoding: gzip")), "compressed (gzip)"),
        (saying(whole(302, b"", b"Location: http://127.0.0.1:1/y")), "redirects to http://127.0.0.1:1/y are not"),
        (Asked.wait_gone, "no whole answer within 0.2 s"),
    ],
)  # fmt: skip
def test_a_hostile_answer_is_one_bounded_line(handle: Handler, needle: str) -> None:
    with pytest.raises(NoAnswer) as failure:
        ask(handle, AnswerLimits(total_s=0.2 if "0.2 s" in needle else 60, max_bytes=1000))
    assert needle in str(failure.value)
    assert 0 < len(str(failure.value)) < 400 and "\n" not in str(failure.value)


def test_the_time_of_an_answer_counts_in_all_not_from_byte_to_byte() -> None:
    async def drip(asked: Asked) -> None:
        await asked.say(PLAIN)
        while not asked.writer.is_closing():
            await asked.say(b"x")
            await asyncio.sleep(0.01)

    with pytest.raises(NoAnswer, match="no whole answer within"):
        ask(drip, SOON)


def test_a_server_that_accepts_no_connection_is_named_with_the_timeout() -> None:
    with socket.socket() as server, closing(socket.socket()) as first, closing(socket.socket()) as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for other in (first, second):  # connections that the system accepts for it
            other.setblocking(False)
            other.connect_ex(server.getsockname())
        with pytest.raises(NoServer, match=r"no server at http://127.0.0.1:\d+: no connection within 0.2 s$"):
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            asyncio.run(HttpClient(url).ask("/x", limits=AnswerLimits(connect_s=0.2, total_s=HANG_S)))


def test_a_server_gets_our_key_and_no_cookie_of_its_own() -> None:
    seen = []

    async def handle(asked: Asked) -> None:
        seen.append(asked.headers)
        await asked.say(whole(200, b"", b"Set-Cookie: a=b"))

    async def twice(url: str) -> None:
        client = HttpClient(url, " k\r\n")  # a variable may end as the file that it came from
        for _ in range(2):
            await client.ask("/x")

    against(handle, twice)
    assert [(each["authorization"], each.get("cookie"), each["accept-encoding"]) for each in seen] == [
        ("Bearer k", None, "identity")
    ] * 2


@pytest.mark.parametrize("key", ["hu\nsh", "hu\0sh", "hush\udcff"])
def test_a_key_that_no_header_can_hold_is_not_shown(key: str) -> None:
    with pytest.raises(UserError, match="the API key has control characters") as caught:
        HttpClient("http://127.0.0.1:1", key)
    assert "hu" not in str(caught.value)


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b""])
def test_a_stream_without_done_is_whole_if_its_body_ends_cleanly(end: bytes) -> None:
    (record,) = send(streaming(A, END, end=end))
    assert (record.text, len(record.token_times_s)) == ("ab", 2)
    assert (record.error is None) == bool(end)


def test_a_connection_that_stays_open_after_done_is_left() -> None:
    async def handle(asked: Asked) -> None:
        await asked.say(STREAM_HEAD, *map(chunk, (A, END, b"data: [DONE]\n\n")))
        await asked.wait_gone()

    assert send(handle)[0].error is None


@pytest.mark.parametrize(
    ("handle", "needle"),
    [
        (saying(whole(429, b'{"error": {"message": "queue\\nfull"}}')), "HTTP 429: queue full"),
        (saying(whole(503, b"<html>\nbusy")), "HTTP 503: <html> busy"),
        (pouring(b"HTTP/1.1 400 no\r\n\r\n", b"x" * 4096), "HTTP 400: xxx"),
        (saying(whole(500, gzip.compress(b"x"), b"Content-Encoding: gzip")), "HTTP 500: the answer is compressed"),
        (saying(whole(307, b"", b"Location: /v2")), "HTTP 307: redirects to /v2 are not followed"),
        (saying(whole(200, b"{}", b"Content-Type: application/json; charset=utf-8")), "does not stream"),
        (streaming(A, A * 100), "more events"),
        (pouring(STREAM_HEAD, chunk(b"data: x\n" * 1000)), "more bytes"),
    ],
)
def test_a_load_against_a_hostile_server_fails_in_one_line(handle: Handler, needle: str) -> None:
    (record,) = send(handle)
    assert record.error is not None
    assert needle in record.error
    assert len(record.error) < 400 and "\n" not in record.error


def test_pings_are_no_tokens() -> None:
    """Pings extend neither the time without a token nor the total time."""

    async def ping(asked: Asked) -> None:
        await asked.say(STREAM_HEAD)
        while not asked.writer.is_closing():
            await asked.say(chunk(b": ping\n\n"))
            await asyncio.sleep(0.01)

    assert send(ping, idle_s=0.1)[0].error == "no token for 0.1 s"
    assert send(ping, timeout_s=0.1)[0].error == "not whole after 0.1 s"
    assert send(Asked.wait_gone, idle_s=0.05)[0].error == "no token for 0.05 s"


# -- texts as prompts --------------------------------------------------------------------------------------------------


def taking(kind: type, seen: list[Any], status: int = 400) -> Handler:
    async def handle(asked: Asked) -> None:
        prompt = asked.json()["prompt"]
        seen.append(prompt)
        if isinstance(prompt, kind):
            await streaming(A, END)(asked)
        else:
            await asked.say(whole(status, b'{"error": {"message": "no such prompt"}}'))

    return handle


def text_of(tokens: Any) -> str:
    return bytes(tokens).decode()


@pytest.mark.parametrize(
    ("way", "takes", "status", "sent", "is_whole"),
    [
        ("auto", list, 400, [[104, 105]] * 2, True),
        ("auto", str, 400, [[104, 105], "hi", "hi"], True),
        ("auto", str, 422, [[104, 105], "hi", "hi"], True),
        ("auto", str, 429, [[104, 105]] * 2, False),  # busy, not refused
        ("auto", dict, 400, [[104, 105], "hi"] * 2, False),
        ("tokens", str, 400, [[104, 105]] * 2, False),
        ("text", str, 400, ["hi"] * 2, True),
        ("text", list, 400, ["hi"] * 2, False),
    ],
)
def test_prompts_are_sent_in_the_form_that_the_server_takes(
    way: str, takes: type, status: int, sent: list[Any], is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    records = send(taking(takes, seen, status), 2, prompts=PromptForm(way, text_of))
    assert seen == sent
    assert all((record.error is None) == is_whole for record in records)
    assert len(caplog.records) == (way == "auto" and is_whole and takes is str)  # logged once


# -- addresses and proxies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["instances"], ["cluster", "drop", "0", "1"], ["bench", "serve", "--model", "m"]])
def test_a_closed_port_is_named_in_one_line(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    url = against(saying(), _itself)
    began_s = time.process_time()
    assert main([*verb, "--base-url", url]) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith(f"floodplain: no server at {url}: Connection refused")
    assert told.endswith(": start one, or give its address with --base-url\n")
    assert told.count("\n") == 1
    assert time.process_time() - began_s < 3


@pytest.mark.parametrize("verb", [["bench", "serve", "--model", "none-such"], ["profile", "llm", "none-such"]])
def test_a_model_without_a_tokenizer_here_needs_one_named(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = against(saying(whole(404, b"")), lambda url: asyncio.to_thread(main, [*verb, "--base-url", url]))
    assert code == 2
    assert "name one with --tokenizer MODEL" in capsys.readouterr().err


async def _itself(url: str) -> str:
    return url


@pytest.mark.parametrize(
    ("status", "body", "needle"),
    [
        (200, b'{"instances": [], "ends": [], "moved_requests": 0, "without_instance": 0}', "not that of a router"),
        (200, b'{"instances": [{"epoch": 1}]}', "not that of a router"),
        (200, b"[" * 100_000, "nested too deeply"),
        (200, b"NaN", "its answer"),
        (200, b"[]", "no JSON object"),
        (200, b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (200, b"x" * (2**20 + 1), "more than 1048576 bytes"),
        (404, b"", "give the --base-url of a server that runs with --instances"),
        (401, b'{"error": {"message": "a key is needed"}}', "a key is needed"),
        (301, b"", "redirects are not followed"),
    ],
)
def test_instances_refuses_invalid_listings(
    status: int, body: bytes, needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = against(saying(whole(status, body)), lambda url: asyncio.to_thread(main, ["instances", "--base-url", url]))
    told = capsys.readouterr().err
    assert code == 1
    assert needle in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("verb", [("drop", "0", "1"), ("restore", "0"), ("migrate", "0", "1")])
def test_a_change_of_a_server_without_instances_is_refused(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = against(
        saying(whole(404, b'{"error": {"message": "Not Found: POST /v1/cluster/x"}}')),
        lambda url: asyncio.to_thread(main, ["cluster", *verb, "--base-url", url]),
    )
    assert code == 1
    assert re.fullmatch(
        r"floodplain: http://127.0.0.1:\d+ has no /v1/cluster/\w+: "
        r"give the --base-url of a server that runs with --instances, without a path\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_requests_to_this_machine_use_no_proxy(host: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoServer, match=f"no server at {scheme}://{re.escape(host)}:1: "):
        asyncio.run(HttpClient(f"{scheme}://{host}:1").ask("/x"))


def test_hosts_in_no_proxy_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "192.0.2.9,mine.invalid")

    async def handle(asked: Asked) -> None:
        await asked.say(whole(200, b"by the proxy"))

    async def ask(url: str) -> None:
        monkeypatch.setenv("http_proxy", url)
        assert (await HttpClient("http://other.invalid:81").ask("/x")).text == "by the proxy"
        with pytest.raises(NoServer):
            await HttpClient("http://mine.invalid:81").ask("/x", limits=AnswerLimits(connect_s=0.2))

    against(handle, ask)


def test_requests_to_others_use_the_proxy_and_an_invalid_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def handle(asked: Asked) -> None:
        await asked.say(whole(200, asked.path.encode()))

    async def through(url: str) -> str:
        monkeypatch.setenv("http_proxy", url)
        return (await HttpClient("http://192.0.2.1:81").ask("/x")).text

    assert against(handle, through) == "http://192.0.2.1:81/x"
    monkeypatch.setenv("http_proxy", "socks5://user:secret@192.0.2.7")
    with pytest.raises(UserError, match="is no HTTP proxy") as failure:
        asyncio.run(HttpClient("http://192.0.2.1:81").ask("/x"))
    assert "secret" not in str(failure.value)


def test_a_result_with_half_characters_can_be_written(tmp_path: Any) -> None:
    from floodplain.observe.strict_json import save_result

    save_result(tmp_path / "r.json", {"errors": ["\ud800"]})
    assert json.loads((tmp_path / "r.json").read_text()) == {"errors": ["\ud800"]}
