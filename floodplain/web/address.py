"""Addresses of servers that users name: their format, and the proxy for them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from floodplain.core.errors import UserError

_HOST = re.compile(r"[^\s\0-\x20\x7f\\]+")


def check_address(name: str, url: str) -> None:
    """Raise UserError, which begins with ``name``, unless ``url`` is an HTTP address without a user and a fragment."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # as the system's resolver will be asked
        is_address = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(host)) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise UserError(f"{name} must look like http://127.0.0.1:8000, not {shown(url)!r}")
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


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for ``url``; None for this machine and for hosts in ``no_proxy``.

    May resolve the host's name, so call it off the event loop. Raises UserError if the proxy is no HTTP proxy.
    """
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if not proxy or proxy_bypass(parts.netloc) or _is_this_machine(parts.hostname or ""):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise UserError(f"{parts.scheme}_proxy {shown(proxy)!r} is no HTTP proxy: name one, or the host in no_proxy")
    return proxy


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the proxy may resolve it
        return False
    return _are_loopback(str(address[0]) for _, _, _, _, address in found)


def _are_loopback(addresses: Iterable[str]) -> bool:
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if not (address.is_loopback or address.is_unspecified):
            return False
    return True
