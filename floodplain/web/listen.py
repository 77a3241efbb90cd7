"""The socket on which a service listens, its address, and whether other machines reach it."""

from __future__ import annotations

import ipaddress
import socket

from floodplain.core.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that refuses clients until the service listens. Raises UserError if it cannot be bound."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
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


def url_of(sock: socket.socket) -> str:
    """The address at which a bound socket serves."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or ``localhost``; other names are not resolved and count as False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
