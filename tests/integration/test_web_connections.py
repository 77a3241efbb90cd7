from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.web.address import bind
from floodplain.web.limits import limit_connections
from tests.support.limited_server import LIMITS, LimitedServer, limited, read_all, read_answer
from tests.support.waiting import HANG_S

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[LimitedServer]:
    with limited() as server:
        yield server


@pytest.mark.parametrize(
    ("before", "first", "rest", "limit_s", "status"),
    [
        (b"", b"", HEAD + b"\r\nabc", LIMITS.head_s, b""),
        (b"", HEAD, b"\r\nabc", LIMITS.head_s, b"HTTP/1.1 408"),
        (b"", HEAD + b"\r\na", b"bc", LIMITS.body_s, b"HTTP/1.1 408"),
        (HEAD + b"\r\nabc", b"", HEAD + b"\r\nabc", LIMITS.idle_s, b""),
        (HEAD + b"\r\nabc", b"\r\n", HEAD + b"\r\nabc", LIMITS.idle_s, b""),
        (HEAD + b"\r\nabc", HEAD, b"\r\nabc", LIMITS.head_s, b"HTTP/1.1 408"),
    ],
    ids=["silent", "half a head", "half a body", "idle", "idle but for a blank line", "half a second head"],
)
def test_each_part_of_a_request_has_its_time_and_no_more(
    before: bytes, first: bytes, rest: bytes, limit_s: float, status: bytes, server: LimitedServer
) -> None:
    for is_late in (False, True):
        with server.connect(before) as client:
            if before:
                assert read_answer(client).startswith(b"HTTP/1.1 200")
            client.sendall(first)
            server.settle(1)
            server.pass_time(limit_s - 0.5)
            if is_late:
                server.pass_time(1.0)
                assert read_all(client)[: len(status) or None] == status
            else:
                client.sendall(rest)
                assert read_answer(client).startswith(b"HTTP/1.1 200")
        server.settle(0)


@pytest.mark.parametrize("version", ["0.9", "1.0"])
@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_bodies_for_old_clients_end_with_the_connection(version: str, connection: bytes, server: LimitedServer) -> None:
    old = HEAD.replace(b"1.1", version.encode()) + b"Expect: 100-continue\r\n" + connection + b"\r\nabc"
    for sent, body in ((old, b"3"), (old.replace(b"POST", b"HEAD"), b"")):
        with server.connect(sent) as client:
            head, _, content = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert content == body
        assert b"\r\nconnection: close" in head and b"transfer-encoding" not in head
    with server.connect(old.replace(b"/x", b"/flood")) as client:
        assert read_all(client)[-1001:] == bytes(1000) + b"3"


@pytest.mark.parametrize("lengths", [
    b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    b"Content-Length: 3\r\nContent-Length: 4\r\n", b"Content-Length: +3\r\n", b"Content-Length: 3, 3\r\n",
    b"Transfer-Encoding: chunked, gzip\r\n", b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n",
])  # fmt: skip
def test_a_request_of_two_lengths_is_refused(lengths: bytes, server: LimitedServer) -> None:
    """A proxy may use the other length, and take the rest for a request of another client."""
    before = len(server.paths)
    with server.connect(
        b"POST /x HTTP/1.1\r\nHost: a\r\n" + lengths + b"\r\n0\r\n\r\nGET /y HTTP/1.1\r\n\r\n"
    ) as client:
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1
    assert "/y" not in server.paths[before:]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(("length", "body"), [(b"Content-Length: 3\r\n", b"abc"), (CHUNKED, b"3\r\nabc\r\n0\r\n\r\n")])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_body_arrives_although_its_client_offers_http_2(
    length: bytes, body: bytes, is_split: bool, server: LimitedServer
) -> None:
    """Java's client offers it with every request. What follows is a request of the same connection."""
    head = b"POST /x HTTP/1.1\r\nHost: a\r\n" + UPGRADE + length + b"\r\n"
    parts = [head, body[:1], body[1:]] if is_split else [head + body]
    with server.connect() as client:
        for _ in range(2):
            for part in parts:
                client.sendall(part)
                server.settle(1)
            assert read_answer(client).endswith(b"1\r\n3\r\n0\r\n\r\n")
        client.sendall((head + body) * 2 + HEAD + b"\r\nabc")
        answers = b""
        while answers.count(b"\r\n0\r\n\r\n") < 3:
            answers += read_answer(client)
        assert answers.count(b"HTTP/1.1 200") == answers.count(b"1\r\n3\r\n0\r\n\r\n") == 3


def test_a_tunnel_is_answered_as_any_other_request(server: LimitedServer) -> None:
    for target, status in ((b"a:443", b"HTTP/1.1 400"), (b"http://a/b", b"HTTP/1.1 ")):
        with server.connect(b"CONNECT " + target + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nabc") as client:
            assert read_all(client).startswith(status)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_connection_with_an_unread_request_is_not_closed(is_stopping: bool, server: LimitedServer) -> None:
    """The request is in the kernel when the idle time is over, or the server stops."""
    with server.connect(HEAD + b"\r\nabc") as client:
        assert read_answer(client)
        server.settle(1)
        (connection,) = server.server_state.connections

        def close_idle_ones() -> None:
            client.sendall(HEAD + b"\r\nabc")
            server.clock.now_s += LIMITS.idle_s + 1
            connection.shutdown() if is_stopping else server.sweep()

        server.call(close_idle_ones)
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        server.settle(1)
        server.clock.now_s += LIMITS.idle_s + 1
        server.call(connection.shutdown if is_stopping else server.sweep)
        assert read_all(client) == b""
    server.settle(0)


def test_asyncio_serves_whatever_other_loop_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example vLLM's uvloop, which uvicorn would use."""
    other = ModuleType("uvloop")
    other.new_event_loop = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uvloop", other)
    with socket.socket() as sock:
        assert LimitedServer(sock=sock).config.get_loop_factory() is asyncio.SelectorEventLoop


def test_a_running_request_may_take_any_time(server: LimitedServer) -> None:
    with server.connect(HEAD.replace(b"/x", b"/hold") + b"\r\nabc" + HEAD) as client:
        while "/hold" not in server.paths:
            server.settle(1)
        for _ in range(3):
            server.pass_time(100.0)
        server.call(server.release.set)
        assert b"200 OK" in read_answer(client)
        client.sendall(b"\r\nabc")
        assert b"200 OK" in read_answer(client)
    server.settle(0)


def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(server: LimitedServer) -> None:
    with server.connect(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        client.recv(1)
        wait_until_stalled(server)
        for _ in range(3):
            server.pass_time(LIMITS.stalled_s - 1)
            for _ in range(200):
                client.recv(2**16)
            wait_until_stalled(server)
            server.pass_time(0)
        server.settle(1)
        server.pass_time(LIMITS.stalled_s + 1)
        server.settle(0)


def test_a_response_can_close_a_connection_whose_client_reads_nothing() -> None:
    with limited() as server, server.connect(b"GET /abort HTTP/1.1\r\nHost: a\r\n\r\n"):
        wait_until_stalled(server)
        server.call(server.release.set)
        server.settle(0)


def wait_until_stalled(server: LimitedServer) -> None:
    sent = [-1, -2]
    while sent[-1] != sent[-2] or sent[-1] <= 0:
        server.settle(1)
        server.call(lambda: sent.append(next(iter(server.server_state.connections))._counted.num_sent_bytes))  # type: ignore[union-attr]


@pytest.mark.parametrize("num_over", [0, 1])
@pytest.mark.parametrize("kind", ["bytes", "count", "url"])
def test_headers_have_a_size_and_a_number_and_no_more(kind: str, num_over: int, server: LimitedServer) -> None:
    size = LIMITS.max_head_bytes - len("/Host: a\r\nX: \r\n") + num_over
    sent = {
        "bytes": b"GET / HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n" % (b"a" * size),
        "count": b"GET / HTTP/1.1\r\nHost: a\r\n%s\r\n" % (b"X: a\r\n" * (LIMITS.max_headers - 1 + num_over)),
        "url": b"GET /%s HTTP/1.1\r\nHost: a\r\nX: \r\n\r\n" % (b"a" * size),
    }[kind]
    with server.connect(sent) as client:
        answer = read_all(client) if num_over else read_answer(client)
        assert answer.startswith(b"HTTP/1.1 431" if num_over else b"HTTP/1.1 200")
        assert not num_over or b'"type": "invalid_request_error"' in answer
    server.settle(0)


@pytest.mark.parametrize("endless", [b"X: " + b"a" * 500_000, b"X: a\r\n" * 80_000, b"\r\n" * 250_000])
def test_an_endless_head_is_not_kept(endless: bytes, server: LimitedServer) -> None:
    begin = b"" if endless.startswith(b"\r\n") else b"GET / HTTP/1.1\r\nHost: a\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
    with client, suppress(ConnectionError):
        client.sendall(begin + endless)
        assert read_all(client).startswith(b"HTTP/1.1 431")
    server.pass_time(LIMITS.linger_s + 1)
    server.settle(0)


@pytest.mark.parametrize("endless", [b"3\r\nabc\r\n0\r\nX: ", b"3\r\nabc\r\n0\r\n", b"3;x="])
@pytest.mark.parametrize("path", [b"/x", b"/early"])
def test_endless_trailers_are_not_kept(path: bytes, endless: bytes, server: LimitedServer) -> None:
    """Nor endless extensions of a chunk; also after the answer, as if no key was given."""
    more = b"X: a\r\n" * 40_000 if endless.endswith(b"0\r\n") else b"a" * 250_000
    head = b"POST %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path, CHUNKED)
    with server.connect(head) as client:
        if path == b"/early":
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        with suppress(ConnectionError):
            client.sendall(endless + more)
            assert read_all(client)[:12] == (b"" if path == b"/early" else b"HTTP/1.1 431")
    server.pass_time(LIMITS.linger_s + 1)
    server.settle(0)


def test_bytes_between_chunks_have_no_bound_together(server: LimitedServer) -> None:
    body = b"1\r\na\r\n" * LIMITS.max_head_bytes + b"0\r\nX-Trailer: a\r\n\r\n"
    with server.connect(b"POST /x HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n" + body) as client:
        assert read_answer(client).endswith(b"\r\n%d\r\n0\r\n\r\n" % LIMITS.max_head_bytes)
    assert b"x-trailer" not in [name for name, _ in server.headers]


def test_a_pipeline_is_answered_in_order_up_to_its_limit(server: LimitedServer) -> None:
    server.paths.clear()
    num = LIMITS.max_pipelined + 1
    with server.connect(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % i for i in range(1500))) as client:
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200") == num
    assert server.paths == [f"/{i}" for i in range(num)]
    server.settle(0)


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"GET http://a HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_our_words(sent: bytes, server: LimitedServer) -> None:
    with server.connect(sent) as client:
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"not valid HTTP" in answer
    server.settle(0)


def test_at_the_cap_the_longest_waiting_connection_is_closed() -> None:
    with limited(replace(LIMITS, max_connections=4)) as server:
        busy = server.connect(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        server.settle(1)
        idle = []
        for number in range(12):
            server.clock.now_s += 0.01
            idle.append(server.connect((b"", HEAD, HEAD + b"\r\n")[number % 3]))
            server.settle(min(4, number + 2))
        with server.connect(HEAD + b"\r\nabc") as client:
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        server.call(server.release.set)
        assert read_answer(busy).startswith(b"HTTP/1.1 200")
        for one in idle[:9]:
            assert read_all(one) == b""
        for one in (busy, *idle):
            one.close()


def test_running_requests_are_never_closed_to_make_room(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), limited(replace(LIMITS, max_connections=3)) as server:
        busy = [server.connect(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(3)]
        server.settle(3)
        later = [server.connect(HEAD + b"\r\nabc") for _ in range(6)]
        while not caplog.records:
            server.settle(3)
        server.call(server.release.set)
        for one in (*busy, *later):
            assert read_answer(one).startswith(b"HTTP/1.1 200")
            one.close()
    assert [record.getMessage() for record in caplog.records] == [
        "all 3 connections are being answered: raise --max-connections"
    ]


class ShortOfFiles(socket.socket):
    """A listening socket that has no file descriptor left, ``num_failures`` times."""

    num_failures = 4

    def accept(self) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_errors_of_accepting_are_survived_and_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    sock = ShortOfFiles(fileno=bind("127.0.0.1", 0).detach())
    with caplog.at_level(logging.WARNING), limited(sock=sock) as server, server.connect(HEAD + b"\r\nabc") as client:
        assert read_answer(client).startswith(b"HTTP/1.1 200")
    assert [record.getMessage()[:44] for record in caplog.records] == ["cannot accept a connection (Too many open fi"]


def test_stopping_does_not_wait_for_half_a_request() -> None:
    with limited() as server:
        busy = server.connect(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        idle = server.connect(HEAD + b"\r\nabc")
        assert read_answer(idle)
        halves = [server.connect(sent) for sent in (b"", HEAD, HEAD + b"\r\na")]
        server.settle(5)
        while server.paths != ["/hold", "/x", "/x"]:
            server.settle(5)
        server.call(server.stop)
        assert [read_all(one)[:12] for one in (*halves, idle)] == [b"", b"", b"HTTP/1.1 503", b""]
        server.call(server.release.set)
        assert read_answer(busy).startswith(b"HTTP/1.1 200")
        server.thread.join()  # although no client closes its connection, and no time passes
        for one in (*halves, busy, idle):
            one.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_client_that_closed_while_nothing_was_read_ends_quietly(is_stopped: bool) -> None:
    with limited() as server:
        client = server.connect(b"POST /deaf HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + bytes(200_000))
        while server.paths != ["/deaf"] or not paused(server):
            server.settle(1)
        client.close()  # data that is sent to it now is answered by a reset
        if is_stopped:
            server.call(server.stop)
        else:
            server.pass_time(LIMITS.body_s + 1)
            server.settle(0)
            with server.connect(HEAD + b"\r\nabc") as other:
                assert read_answer(other).startswith(b"HTTP/1.1 200")


def paused(server: LimitedServer) -> bool:
    """Whether the server has paused reading on all connections."""
    flows: list[bool] = []
    server.call(lambda: flows.extend(one.flow.read_paused for one in server.server_state.connections))
    return all(flows)


def test_connections_must_fit_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    assert limit_connections(None).max_connections == 192
    assert limit_connections(192).max_connections == 192
    with pytest.raises(UserError, match="ulimit -n 257"):
        limit_connections(193)
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    with pytest.raises(UserError, match="ulimit -n"):
        limit_connections(None)
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert limit_connections(None).max_connections == 4096
