"""Bounds on connections: their number, time and size. Light to import: the command line is built from it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.flags import check_between

RESERVED_FILES = 64
"""Open files reserved for all but connections: the model, the store, other services, accepted sockets."""

MOST_BY_DEFAULT = 4096
"""The default of ``--max-connections`` if the limit of open files allows more."""

LEAST_CONNECTIONS = 8
"""With fewer, a few probes and scrapers could take all connections."""

MAX_CONNECTIONS_HELP = (
    "connections that may be open at once (default: ulimit -n less 64 and what --instances take, at most 4096)"
)


KEEP_ALIVE_S = 75.0
"""Longer than proxies keep idle connections (most: 60 s): a request on one that the server closes gets a 502."""

KEEP_ALIVE_HELP = "seconds for which an idle connection is kept: more than the balancer before it keeps one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on the number of connections, and on each of them.

    Attributes:
        max_connections: At this many, the one that has waited longest for its client is closed to make room.
        head_s: Seconds from the start of a request, or of the connection, to the end of the headers.
        body_s: Seconds from there to the end of the body.
        stalled_s: Seconds within which a client must receive some bytes of a pending answer.
        linger_s: Seconds in which a client may read the reason before its connection is closed.
        max_head_bytes: Of the request line and the headers.
        max_pipelined: Requests that may wait behind the one being answered; the connection closes after these.
    """

    max_connections: int
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = KEEP_ALIVE_S
    stalled_s: float = 60.0
    linger_s: float = 2.0
    max_head_bytes: int = 2**16
    max_headers: int = 100
    max_pipelined: int = 16


def limit_connections(
    asked: int | None, keep_alive_s: float = KEEP_ALIVE_S, *, num_reserved: int = 0
) -> ConnectionLimits:
    """Limits of a service: ``asked`` connections, or as many as open files leave. UserError if these are too few.

    ``num_reserved`` files are for other uses of the service.
    """
    num_reserved += RESERVED_FILES
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_BY_DEFAULT if num_files == resource.RLIM_INFINITY else num_files - num_reserved
    if most < (asked or LEAST_CONNECTIONS):
        flag = "" if asked is None else f"--max-connections {asked} needs more: "
        needed = (asked or LEAST_CONNECTIONS) + num_reserved
        raise UserError(f"{flag}this process may open {num_files} files: run ulimit -n {needed} first")
    return ConnectionLimits(max_connections=asked or min(most, MOST_BY_DEFAULT), idle_s=keep_alive_s)


def check_connection_flags(config: Any) -> None:
    """Raise UserError if a service's ``max_connections`` or ``keep_alive_timeout`` is out of range on any machine."""
    check_between(config, "max_connections", LEAST_CONNECTIONS, 2**20)
    check_between(config, "keep_alive_timeout", 1, 86400, "seconds")
