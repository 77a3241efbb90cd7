"""Where a service listens: its socket, its address, and who can reach it."""

from __future__ import annotations

import ipaddress
import socket

from floodplain.core.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening: clients are refused, not kept waiting, until the service is ready.

    The caller closes it.

    Raises:
        UserError: The port is taken, or the address is not this machine's.
    """
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
    """Whether only this machine reaches ``host``; of names, which are not looked up, ``localhost`` alone counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
