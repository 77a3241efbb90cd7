"""The flags of a coordinator, and the permissions of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from floodplain.coordinator.settings import CoordinatorConfig, default_store
from floodplain.coordinator.tokens import MAY_SAY, UNRESTRICTED, Caller, Role, TokenRing
from floodplain.core.errors import UserError
from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import LeaseEvent, LeaseId, Stamp
from tests.support import lease_values
from tests.support.secret_files import secret_file


@pytest.mark.parametrize(
    "flags",
    [
        {"port": -1},
        {"port": 65536},
        {"ttl": 0.5},
        {"ttl": 3601.0},
        {"ttl": float("nan")},
        {"max_leases": 0},
        {"max_leases": 8193},
        {"max_borrowed": 1},
        {"forget_after": 0.0},
        {"forget_after": float("nan")},
        {"forget_after": 10 * 365 * 86400 + 1.0},
        {"max_connections": 7},
        {"max_connections": 2**20 + 1},
        {"keep_alive_timeout": 0.9},
        {"keep_alive_timeout": 86401.0},
        {"url": ""},
        {"url": "10.0.0.1:8100"},
        {"url": "ftp://host"},
        {"url": "http://"},
        {"url": "http://["},
        {"url": "http://:80"},
        {"url": "http://h:x"},
        {"url": "http://host\r\nX: y"},
        {"url": "http://h\u00f6st"},
        {"url": "http://host\0"},
        {"url": "http://host:0"},
        {"url": "http://a..b"},
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_the_flag(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(flags)).replace('_', '-')} must be") as caught:
        CoordinatorConfig(**flags)
    assert "\n" not in str(caught.value)


def test_values_at_their_bounds_are_taken() -> None:
    CoordinatorConfig(ttl=1.0, max_leases=1, forget_after=1.0, max_connections=8, keep_alive_timeout=1.0)
    CoordinatorConfig(least_lease=2**20, max_borrowed=2**20)
    decade_s = 10 * 365 * 86400.0
    CoordinatorConfig(
        ttl=3600.0, max_leases=8192, forget_after=decade_s, max_connections=2**20, keep_alive_timeout=86400.0
    )


def test_the_default_store_lies_in_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_store() == default_store() == f"sqlite:///{tmp_path}/state/floodplain/leases.db"
    assert (tmp_path / "state" / "floodplain").stat().st_mode & 0o777 == 0o700


def test_a_state_folder_that_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(UserError, match="give --store sqlite:///FILE"):
        default_store()


def test_a_user_without_a_home_is_told_to_name_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(UserError, match=r"no home folder .*: give --store sqlite:///FILE"):
        default_store()


# -- permissions -------------------------------------------------------------------------------------------------------


STAMP = Stamp(1, 1)


def messages(name: str) -> dict[str, Message]:
    """One of each kind, from one member."""
    each: list[Message] = [
        Join(name, "i"),
        Leave(name, 1),
        Heartbeat(name, 1),
        Offer(name, STAMP, 1),
        Recall(name, STAMP, 1, 1.0),
        Observe(name, STAMP, 1),
        Request(name, 1, 1, (Shard(1),)),
        Report(name, LeaseId("l"), STAMP, LeaseEvent.HOLD),
    ]
    return {type(message).__name__: message for message in each}


LIVES = {"Join", "Leave", "Heartbeat"}
LENDS = {"Offer", "Recall", "Observe"}
BORROWS = {"Request", "Report"}


@pytest.mark.parametrize(
    ("role", "may"),
    [(Role.PRODUCER, LIVES | LENDS), (Role.CONSUMER, LIVES | BORROWS), (Role.ADMIN, LIVES | LENDS | BORROWS)],
)
def test_each_role_may_send_its_own_messages_and_no_others(role: Role, may: set[str]) -> None:
    caller = Caller(((role, "gpu-0"),))
    assert {kind for kind, message in messages("gpu-0").items() if caller.may_say(message)} == may
    assert {kind.__name__ for kind in MAY_SAY[role]} == may
    others = {kind for kind, message in messages("gpu-1").items() if caller.may_say(message)}
    assert others == (may if role is Role.ADMIN else set())


def test_each_line_of_a_token_allows_its_messages_for_its_names() -> None:
    caller = Caller(((Role.PRODUCER, "gpu-0"), (Role.CONSUMER, "engine-*")))
    allowed = {name: {k for k, m in messages(name).items() if caller.may_say(m)} for name in ("gpu-0", "engine-7")}
    assert allowed == {"gpu-0": LIVES | LENDS, "engine-7": LIVES | BORROWS}
    assert not caller.is_admin


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("gpu-0", ["gpu-0"], ["gpu-00", "gpu-", "GPU-0", "xgpu-0"]),
        ("gpu-*", ["gpu-0", "gpu-", "gpu-a.b"], ["gpu", "GPU-0", "xgpu-0"]),
        ("gpu-?", ["gpu-0"], ["gpu-", "gpu-10"]),
        ("gpu-[01]", ["gpu-0", "gpu-1"], ["gpu-2", "gpu-[01]"]),
        ("*", ["a", "gpu-0"], []),
        ("[", ["["], ["a"]),
    ],
)
def test_a_pattern_covers_whole_names(pattern: str, covered: list[str], others: list[str]) -> None:
    caller = Caller(((Role.CONSUMER, pattern),))
    assert [caller.may_say(Heartbeat(name, 1)) for name in covered] == [True] * len(covered)
    assert [caller.may_say(Heartbeat(name, 1)) for name in others] == [False] * len(others)


@given(message=lease_values.MESSAGES)
def test_where_no_tokens_are_required_all_messages_are_allowed(message: Message) -> None:
    assert UNRESTRICTED.may_say(message) and UNRESTRICTED.is_admin


def test_a_line_is_an_admins_token_or_a_role_a_name_and_a_token(tmp_path: Path) -> None:
    text = "# tokens\nroot1\n\nproducer gpu-0 t1\n  consumer\tgpu-* t2 \nconsumer gpu-0 t1\nadmin ops t3\n"
    ring = TokenRing.from_file(secret_file(tmp_path, text))
    callers = [ring.client_of(f"Bearer {token}".encode()) for token in ("root1", "t1", "t2", "t3")]
    assert [caller.grants for caller in callers if caller is not None] == [
        ((Role.ADMIN, "*"),),
        ((Role.PRODUCER, "gpu-0"), (Role.CONSUMER, "gpu-0")),
        ((Role.CONSUMER, "gpu-*"),),
        ((Role.ADMIN, "ops"),),
    ]
    assert ring.client_of(b"Bearer t4") is None


def test_a_consumers_pattern_does_not_cover_a_name_of_anothers_lender(tmp_path: Path) -> None:
    text = "producer gpu-0 t1\nconsumer gpu-0 t1\nproducer gpu-8* t1\nconsumer gpu-* t2\nconsumer gpu-0 t3\n"
    ring = TokenRing.from_file(secret_file(tmp_path, text))
    said = {
        (token, name): {kind for kind, message in messages(name).items() if caller.may_say(message)}
        for token in ("t1", "t2", "t3")
        for caller in [ring.client_of(f"Bearer {token}".encode())]
        for name in ("gpu-0", "gpu-1", "gpu-80")
        if caller is not None
    }
    borrows = LIVES | BORROWS
    assert [said["t1", name] for name in ("gpu-0", "gpu-1", "gpu-80")] == [borrows | LENDS, set(), LIVES | LENDS]
    assert [said["t2", name] for name in ("gpu-0", "gpu-1", "gpu-80")] == [set(), borrows, borrows]
    assert [said["t3", name] for name in ("gpu-0", "gpu-1")] == [borrows, set()]


def test_a_producers_or_an_admins_line_allows_lending() -> None:
    producer, consumer = Caller(((Role.PRODUCER, "gpu-*"),)), Caller(((Role.CONSUMER, "*"),))
    assert (producer.may_lend("gpu-1"), producer.may_lend("app"), consumer.may_lend("gpu-1")) == (True, False, False)
    assert (producer.is_producer("gpu-1"), consumer.is_producer("gpu-1")) == (True, False)
    assert UNRESTRICTED.may_lend("gpu-1") and not UNRESTRICTED.is_producer("gpu-1")


@pytest.mark.parametrize(
    "text",
    ["", "# only\n", "a b\n", "reader gpu-0 s3cret\n", "Producer gpu-0 s3cret\n", "producer gpu-0 s3cret more\n"],
)
def test_a_malformed_file_is_refused_in_one_line_that_shows_no_token(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"TOKEN,? or ROLE NAME TOKEN") as caught:
        TokenRing.from_file(secret_file(tmp_path, text))
    assert "\n" not in str(caught.value) and "s3cret" not in str(caught.value)


def test_a_role_alone_on_its_line_is_no_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 2"):
        TokenRing.from_file(secret_file(tmp_path, "token\nconsumer\n"))


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="others may use the token file"):
        TokenRing.from_file(secret_file(tmp_path, "t", 0o644))
