"""Host names and origins that a coordinator accepts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.web.origin import LOOPBACK_ONLY, OwnNames

LOOPBACK = ["127.0.0.1", "127.0.0.1:8100", "127.9.9.9:1", "localhost", "LOCALHOST:8100", "[::1]", "[::1]:8100"]
STRANGERS = [
    "", "evil.example", "evil.example:8100", "localhost.evil.example", "127.0.0.1.evil.example",
    "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1", "[", "a b", "127.0.0.1:x", "2130706433", "0x7f.1",
    "127.1", "\x00", ":8100",
]  # fmt: skip
ADDRESSES = ["10.1.2.3", "192.168.0.7:8100", "[2001:db8::1]:80"]


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (LOOPBACK_ONLY, []),
        (OwnNames.of("127.0.0.1", None), []),
        (OwnNames.of("127.0.0.1", "http://Coord.example:8100"), ["coord.example", "COORD.example:9"]),
        (OwnNames.of("10.0.0.1", None), ["10.0.0.1", "10.0.0.1:8100"]),
        (OwnNames.of("gpu-host", None), ["gpu-host:8100"]),
        (OwnNames.of("0.0.0.0", None), ADDRESSES),
        (OwnNames.of("::", "https://coord.example"), [*ADDRESSES, "coord.example", "coord.example:443"]),
    ],
)
def test_a_host_is_loopback_or_a_name_that_was_given(names: OwnNames, more: list[str]) -> None:
    for host in (*LOOPBACK, *more):
        assert names.has_host(host), host
    for host in (*STRANGERS, *(set(ADDRESSES) - set(more)), "other.example"):
        assert not names.has_host(host), host


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://127.0.0.1:8100", "127.0.0.1:8100", True),
        ("http://LOCALHOST:8100", "localhost:8100", True),
        ("https://coord.example", "127.0.0.1:8100", True),
        ("http://127.0.0.1:3000", "127.0.0.1:8100", False),
        ("http://localhost:8100", "127.0.0.1:8100", False),
        ("http://evil.example", "127.0.0.1:8100", False),
        ("http://evil.example@127.0.0.1:8100", "127.0.0.1:8100", False),
        ("https://coord.example.evil", "127.0.0.1:8100", False),
        ("null", "127.0.0.1:8100", False),
        ("", "127.0.0.1:8100", False),
        ("", "", False),
        ("http://[", "[", False),
    ],
)
def test_an_origin_is_where_the_request_went_or_the_url(origin: str, host: str, is_own: bool) -> None:
    assert OwnNames.of("127.0.0.1", "https://coord.example").has_origin(origin, host) is is_own


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_other_text_is_a_name_of_ours(host: str, origin: str) -> None:
    assert not LOOPBACK_ONLY.has_host(f"evil.{host}")
    assert not LOOPBACK_ONLY.has_origin(f"evil.{origin}", "127.0.0.1:8100")
