"""Host names and origins that a coordinator accepts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.files.reading import FileContent
from floodplain.web.bearer import SecretRing, check_exposure, read_secret, read_secret_lines
from floodplain.web.errors import ApiError
from floodplain.web.origin import LOOPBACK_ONLY, OwnNames, expect_own_names
from tests.support.secret_files import secret_file

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


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ([], True),
        ([(b"host", b"127.0.0.1")], True),
        ([(b"host", b"")], False),
        ([(b"host", b"evil.example")], False),
        ([(b"host", b"127.0.0.1"), (b"host", b"127.0.0.1")], False),
        ([(b"origin", b"http://127.0.0.1")], False),
    ],
)
def test_a_request_without_host_is_of_no_page(headers: list[tuple[bytes, bytes]], is_own: bool) -> None:
    """Balancers' checks over HTTP/1.0 have none; browsers send one."""
    with nullcontext() if is_own else pytest.raises(ApiError):
        expect_own_names({"headers": headers}, LOOPBACK_ONLY)


# -- bearer tokens -----------------------------------------------------------------------------------------------------


SECRETS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda secret: secret.encode() == secret.encode().strip()
)


def test_lines_keep_their_numbers_where_others_are_skipped(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "# two of them\n\n  a  b \n#c\nd\n", 0o400)
    assert read_secret_lines(path, "token file") == [(3, ["a", "b"]), (5, ["d"])]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602])
def test_a_file_that_others_may_open_is_refused_by_its_kind(mode: int, tmp_path: Path) -> None:
    path = secret_file(tmp_path, "a", mode)
    with pytest.raises(
        UserError, match=f"others may use the token file {path} .mode {mode:04o}, group .*: run chmod 600 {path}"
    ):
        read_secret_lines(path, "token file")


@pytest.mark.parametrize(("egid", "groups"), [(7, [8]), (8, [7]), (8, [9])])
def test_a_group_of_ours_may_read_what_nothing_may_write(
    egid: int, groups: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getegid", lambda: egid)
    monkeypatch.setattr("os.getgroups", lambda: groups)
    for mode in range(0o1000):
        content = FileContent(b"a", mode, 7)
        monkeypatch.setattr("floodplain.web.bearer.read_file", lambda *_, content=content: content)
        try:
            is_read = bool(read_secret_lines(tmp_path, "token file"))
        except UserError:
            is_read = False
        group, others = mode >> 3 & 7, mode & 7
        is_read_only = not mode & 0o333
        assert is_read is (others == 0 and (group == 0 or (group == 4 and is_read_only and 7 in (egid, *groups))))


def test_a_secret_is_the_last_word_of_the_first_line_that_is_one(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path, "# a comment\n\nconsumer gpu-* s3cret\nother\n"), "token file") == "s3cret"
    with pytest.raises(UserError, match=r"the token file .* is empty: write the token into it"):
        read_secret(secret_file(tmp_path, "# nothing\n"), "token file")


@pytest.mark.parametrize("line", ["s3cret # of bob", "s3cret #bob", "bob s3cret #", "consumer gpu-* s3cret # bob"])
def test_a_comment_behind_a_secret_is_refused(line: str, tmp_path: Path) -> None:
    """Its last word would be the secret, and anything before it a name, which logs and metrics show."""
    path = secret_file(tmp_path, f"other\n{line}\n")
    for read in (read_secret_lines, read_secret):
        with pytest.raises(UserError, match=f"{path}, line 2: a comment needs a line of its own"):
            read(path, "token file")


def test_an_unreadable_file_is_refused_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with pytest.raises(UserError, match=f"cannot read the token file {path}: "):
            read_secret_lines(path, "token file")


@given(st.dictionaries(SECRETS, st.integers()), SECRETS)
def test_a_secret_finds_its_owner_and_no_other(owners: dict[str, int], secret: str) -> None:
    ring = SecretRing(owners)
    for given_secret in [*owners, secret]:
        sent = given_secret.encode()
        assert ring.client_of(b"Bearer " + sent) == owners.get(given_secret)
        assert ring.client_of(b"bEARER  " + sent + b" ") == owners.get(given_secret)
        assert ring.client_of(b"Basic " + sent) is None
        assert ring.client_of(sent) is None


@given(st.binary(max_size=30))
def test_no_other_header_gets_in(header: bytes) -> None:
    ring = SecretRing({"a-long-enough-s\u00e9cret": 1})
    assert ring.client_of(header) is None
    assert ring.client_of("Bearer a-long-enough-s\u00e9cret".encode() + header.strip() + b"x") is None
    assert ring.client_of("Bearer a-long-enough-s\u00e9cret".encode("latin-1")) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_other_machines_need_a_secret(host: str) -> None:
    check_exposure(host, SecretRing({"a": 1}), "--key-file")
    told = f"--host {host} lets other machines in: give --key-file FILE, or --host 127.0.0.1"
    with nullcontext() if host == "127.0.0.1" else pytest.raises(UserError, match=told):
        check_exposure(host, None, "--key-file")
