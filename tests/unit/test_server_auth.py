from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.core.request import NO_GOALS, Goals
from floodplain.server.auth import KEY_LINE, Client, KeyRing
from tests.support.secret_files import secret_file


def test_a_line_is_a_key_or_a_name_and_a_key(tmp_path: Path) -> None:
    keys = KeyRing.from_file(secret_file(tmp_path, "# keys\nsecret1\n\nann secret2\nann secret3\n"))
    clients = [keys.client_of(f"Bearer {key}".encode()) for key in ("secret1", "secret2", "secret3", "secret4")]
    assert clients == [Client("key-2"), Client("ann"), Client("ann"), None]


def test_a_line_that_begins_with_admin_is_an_admins(tmp_path: Path) -> None:
    plain = "admin secret-2\nadmin secret-3 7\nadmin secret-4 tpot=9\nann secret-5\nkey-6\n"
    keys = KeyRing.from_file(secret_file(tmp_path, f"admin ops 8letters -5 ttft=200\n{plain}"))
    ops = Client("ops", -5, best_goals=Goals(ttft_s=0.2), is_admin=True)
    assert keys.client_of(b"Bearer 8letters") == ops
    others = [keys.client_of(f"Bearer {line.split()[1 if ' ' in line else 0]}".encode()) for line in plain.splitlines()]
    names = ["admin", "admin", "admin", "ann", "key-6"]
    assert [(one.name, one.is_admin) for one in others if one] == [(name, False) for name in names]


def test_a_key_may_have_a_ceiling_of_priority(tmp_path: Path) -> None:
    keys = KeyRing.from_file(secret_file(tmp_path, "ops secret1 -5\nbatch secret2 3\n"))
    ops, batch = keys.client_of(b"Bearer secret1"), keys.client_of(b"Bearer secret2")
    assert ops is not None and batch is not None
    assert [ops.priority(-5), ops.priority(None), ops.priority(7)] == [-5, 0, 7]
    assert [batch.priority(3), batch.priority(None)] == [3, 3]


def test_a_key_may_have_floors_for_goals(tmp_path: Path) -> None:
    keys = KeyRing.from_file(secret_file(tmp_path, "ops s1 -5 ttft=200 tpot=50\nann s2 tpot=100\nbob s3\n"))
    ops, ann, bob = (keys.client_of(f"Bearer s{number}".encode()) for number in (1, 2, 3))
    assert ops is not None and ann is not None and bob is not None
    assert ops == Client("ops", -5, best_goals=Goals(ttft_s=0.2, tpot_s=0.05))
    for goals in (NO_GOALS, Goals(ttft_s=0.2, tpot_s=0.05), Goals(tpot_s=9.0)):
        assert ops.goals(goals) == goals
    assert ann.goals(Goals(ttft_s=1e-9, tpot_s=0.1)) == Goals(ttft_s=1e-9, tpot_s=0.1)
    assert bob.goals(Goals(ttft_s=1e-9, tpot_s=1e-9)) == Goals(ttft_s=1e-9, tpot_s=1e-9)
    with pytest.raises(UserError, match="ttft_goal_ms 100 is below this API key's floor: send 200 or more"):
        ops.goals(Goals(ttft_s=0.1, tpot_s=1.0))
    with pytest.raises(UserError, match="tpot_goal_ms 99 is below this API key's floor: send 100 or more"):
        ann.goals(Goals(tpot_s=0.099))


@pytest.mark.parametrize(("client", "asked"), [(Client(), -1), (Client("ops", -5), -6), (Client("batch", 3), 2)])
def test_a_priority_beyond_the_ceiling_of_its_key_is_refused(client: Client, asked: int) -> None:
    with pytest.raises(UserError, match=f"priority {asked} is beyond this API key's ceiling"):
        client.priority(asked)


def test_a_name_may_not_be_that_of_a_key_without_one(tmp_path: Path) -> None:
    """Otherwise two keys would be one client and share prefixes."""
    with pytest.raises(UserError, match="line 2: the name key-1 is for keys without a name"):
        KeyRing.from_file(secret_file(tmp_path, "secret-a\nkey-1 secret-b\n"))


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="others may use the API key file"):
        KeyRing.from_file(secret_file(tmp_path, "k", 0o644))


@pytest.mark.parametrize(
    "text",
    [
        "", "# only\n", "a b c\n", "admin b 1000\n", "admin b 5x\n", "admin b secret-key x\n", "admin b 7letter\n",
        "ann secret admin\n", "a b 1 2\n", "a b 1.5\n", "a b tpot=1 tpot=2\n", "a b tpot=0\n", "a b ttft=-1\n",
        "a b 1tpot=5\n", "a b tpot=5 1\n", "k\nk\n", "ann k\nbob k\n", "owner ops secret-of-ops\n",
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="KEY") as caught:
        KeyRing.from_file(secret_file(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[admin] ops secret-of-ops\n", "write admin without brackets; "),
        ("owner ops secret-of-ops\n", "word 3 is no limit; "),
        ("admin ops secret-of-ops 1 tpot=x\n", "word 5 is no limit; "),
        ("ops secret-of-ops tpot=5 1\n", "word 4 is no limit; "),
        ("ops secret-of-ops tpot=5 tpot=6\n", ""),
    ],
)
def test_the_wrong_word_of_a_line_is_counted_and_not_shown_as_it_may_be_a_key(
    text: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        KeyRing.from_file(secret_file(tmp_path, text))
    assert str(caught.value).endswith(f", line 1: {problem}write {KEY_LINE}, with whole numbers")
    assert "secret-of-ops" not in str(caught.value)


names, salts = (
    st.text("ab- ", min_size=1, max_size=3).map(lambda text: text.replace(" ", "_")),
    st.text("ab _", max_size=3),
)


@given(st.tuples(names, salts), st.tuples(names, salts))
def test_no_two_clients_can_have_one_cache_salt(one: tuple[str, str], other: tuple[str, str]) -> None:
    first, second = (Client(name).cache_salt(salt) for name, salt in (one, other))
    assert (first == second) == (one == other)
    assert Client(one[0], shares_prefixes=True).cache_salt(one[1]) == Client().cache_salt(one[1]) == one[1]
