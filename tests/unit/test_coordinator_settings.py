"""The flags of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from floodplain.coordinator.settings import CoordinatorConfig, default_store
from floodplain.core.errors import UserError


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
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_the_flag(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(flags)).replace('_', '-')} must be") as caught:
        CoordinatorConfig(**flags)
    assert "\n" not in str(caught.value)


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
