from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.web.address import bind, is_loopback, url_of
from floodplain.web.limits import ConnectionLimits
from floodplain.web.serving import Acceptor


def test_a_bound_socket_refuses_clients_until_it_listens() -> None:
    with closing(bind("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
        assert url_of(sock) == f"http://127.0.0.1:{address[1]}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        sock.listen()
        socket.create_connection(address).close()


class BoundToIpv6(socket.socket):
    """A socket as on a machine with IPv6."""

    def getsockname(self) -> tuple[str, int, int, int]:
        return "::1", 8000, 0, 0


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    with closing(BoundToIpv6()) as sock:
        assert url_of(sock) == "http://[::1]:8000"


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(.*\): choose another --port"):
            bind("127.0.0.1", port)


def test_a_name_of_both_kinds_of_address_is_bound_to_that_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are told 127.0.0.1 reach ``--host localhost``."""
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with closing(bind("localhost", 0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_what_others_may_reach_is_not_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.com", "")))


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "203.0.113.1"])
def test_a_host_that_is_not_this_machines_is_refused_in_one_line(host: str) -> None:
    with pytest.raises(UserError, match=f"cannot listen on {host}:0 .*: choose another --port or --host") as caught:
        bind(host, 0)
    assert "\n" not in str(caught.value)


# -- accepted connections of the web server ----------------------------------------------------------------------------


async def test_a_connection_whose_task_is_cancelled_before_it_begins_is_closed() -> None:
    config: Any = SimpleNamespace()
    state: Any = SimpleNamespace(connections=set())
    ours, theirs = socket.socketpair()
    with socket.socket() as listener, theirs:
        acceptor = Acceptor(listener, config, state, {}, ConnectionLimits(max_connections=8))
        acceptor._make = asyncio.Protocol  # type: ignore[assignment]
        acceptor.open()
        acceptor.take(ours)
        [task] = acceptor._opening.values()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        acceptor.close()
        assert ours.fileno() == -1
