"""Refuses requests that a foreign web page makes a browser send to this machine's services.

A page reaches a service by its address, and the browser names the page in ``Origin``; or by the page's own name that
points there (DNS rebinding), which is in ``Host``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.types import Scope

from floodplain.web.address import is_loopback
from floodplain.web.errors import ApiError

_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class OwnNames:
    """The names by which a service may be addressed.

    Attributes:
        hosts: Host names and addresses, in lower case, beside those of this machine's loopback.
        origins: Origins of pages that it, or the proxy before it, serves itself.
        any_address: Whether every numeric address is accepted: no page can have one as its name.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    any_address: bool = False

    @classmethod
    def of(cls, host: str, url: str | None) -> OwnNames:
        """The names of a service that listens on ``host`` and is reached at ``url``; None: there is no such address."""
        told = _split(url or "")
        is_everywhere = _is_address(host) and ipaddress.ip_address(host).is_unspecified
        names = {host, told.hostname or "", socket.gethostname() if is_everywhere else ""} - {""}
        origins = {f"{told.scheme}://{told.netloc}"} if told.netloc else set()
        return cls(
            frozenset(name.lower() for name in names), frozenset(origin.lower() for origin in origins), is_everywhere
        )

    def has_host(self, host: str) -> bool:
        """Whether a ``Host`` header names this service."""
        name = (_split(f"//{host}").hostname or "").lower()
        return name in self.hosts or is_loopback(name) or (self.any_address and _is_address(name))

    def has_origin(self, origin: str, host: str) -> bool:
        """Whether an ``Origin`` header names a page of this service, which was asked for as ``host``."""
        return origin.lower() in self.origins or _split(origin).netloc.lower() == host.lower() != ""


LOOPBACK_ONLY = OwnNames()


def expect_own_names(scope: Scope, names: OwnNames) -> None:
    """Raise ApiError 403 if ``Host`` or ``Origin`` is not this service's.

    Without ``Host`` the sender is no browser: it may be the health check of a balancer that uses HTTP/1.0.
    """
    hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
    host = hosts[0] if len(hosts) == 1 else ""
    if hosts and not names.has_host(host):
        told = f"this service is not {_shown(host)}: ask it by the name in its --host, or in a coordinator's --url"
        raise ApiError(403, told, code="wrong_host")
    wrong = next((origin for origin in origins if not names.has_origin(origin, host)), None)
    if wrong is not None:
        raise ApiError(403, f"pages of {_shown(wrong)} may not use this service", code="wrong_origin")


def expect_json(scope: Scope) -> None:
    """Raise ApiError 415 unless the body is declared as JSON: a browser asks another site before it sends that type."""
    kinds = [kind.partition(";")[0].strip().lower() for kind in _values(scope, b"content-type")]
    if kinds != ["application/json"]:
        raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")


def _values(scope: Scope, name: bytes) -> Sequence[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _shown(text: str) -> str:
    return repr(text[:_MAX_SHOWN_CHARS])


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        return parts if parts.hostname is not None and (parts.port or 0) >= 0 else urlsplit("")
    except ValueError:
        return urlsplit("")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
