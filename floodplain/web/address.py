"""Addresses: of servers that users name, and of the socket on which a service listens."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any
from urllib.parse import SplitResult, urlsplit

from floodplain.core.errors import UserError

_HOST = re.compile(r"[^\s\0-\x20\x7f\\]+")


def split_url(url: str) -> SplitResult | None:
    """The parts of an HTTP address, whose host and port a client can connect to; None if it is none."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # as the system's resolver will be asked
        is_address = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(host)) and parts.port != 0
    except ValueError:
        return None
    return parts if is_address and url.isprintable() and " " not in url else None


def check_address(name: str, url: str, example: str = "http://127.0.0.1:8000") -> None:
    """Raise UserError, which begins with ``name``, unless ``url`` is an HTTP address without a user and a fragment."""
    parts = split_url(url)
    if parts is None:
        raise UserError(f"{name} must look like {example}, not {shown(url)!r}")
    if parts.username is not None or parts.fragment:
        raise UserError(f"{name} {shown(url)!r}: leave out the user and the fragment")


def check_base_url(url: str, name: str = "--base-url") -> str:
    """``url`` without a slash at its end, for paths. Raises UserError as ``check_address``, or if it has a query."""
    check_address(name, url)
    if "?" in url:
        raise UserError(f"{name} {url!r}: leave out the query")
    return url.rstrip("/")


def shown(url: str) -> str:
    """``url`` without a user's name and password."""
    head, _, tail = url.rpartition("@")
    return f"{head.partition('//')[0]}//{tail}" if head else url


def resolve(host: str, port: int, kind: socket.SocketKind) -> Any:
    """The first address of a name as ``getaddrinfo`` has it, one of IPv4 if there is one. Raises OSError if none is.

    ``localhost`` is ``127.0.0.1`` even where ``::1`` comes first: on some machines without IPv6, too.
    """
    return min(socket.getaddrinfo(host, port, type=kind), key=lambda one: one[0] != socket.AF_INET)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that refuses clients until the service listens. Raises UserError if it cannot be bound."""
    try:
        family, kind, proto, _, address = resolve(host, port, socket.SOCK_STREAM)
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})"
        raise UserError(f"{reason}: choose another --port or --host") from error
    return sock


def host_port(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(sock: socket.socket) -> str:
    """The address at which a bound socket serves."""
    return f"http://{host_port(*sock.getsockname()[:2])}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or ``localhost``; other names are not resolved and count as False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
