"""A profile file is read as it was written; a malformed one is refused in one line with its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.errors import UserError
from floodplain.files.profile import RESULT_KEYS, Profile, read_profile
from floodplain.observe.strict_json import save_result

VALUES: dict[type, Any] = {float: 2.5, int: 2**31, str: "producer"}


def make_profile(kind: str = "llm", **result: Any) -> Profile:
    values = {key: VALUES[what] for key, what in RESULT_KEYS[kind].items()} | result
    return Profile(kind=kind, subject="smollm2", machine="a laptop", settings={"seed": 0}, result=values)


@pytest.mark.parametrize("kind", RESULT_KEYS)
def test_it_is_read_as_it_was_written(kind: str, tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", make_profile(kind)
    save_result(path, profile.to_json())
    assert read_profile(path) == read_profile(path, kind) == profile


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_producers_spare_what_is_free_and_consumers_need_what_bursts_take(free: int, needed: int) -> None:
    assert make_profile(free_bytes=free, role="producer").spare_bytes == free
    assert make_profile(free_bytes=free, role="consumer").spare_bytes == 0
    assert make_profile("swap", needs_bytes=needed).spare_bytes == -needed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "x"}, "is no profile"),
        ({"version": 2}, "version 2"),
        ({"kind": "soup"}, "kind 'soup'"),
        ({"kind": ["llm"]}, "kind"),
        ({"tries": {}}, "tries must be a list"),
        ({"machine": 3}, "machine must be a text"),
        ({"result": {}}, r"result\.rate_rps"),
        ({"result": make_profile(rate_rps="fast").result}, r"result\.rate_rps"),
        ({"result": make_profile(free_bytes=-1).result}, r"result\.free_bytes"),
        ({"result": make_profile(free_bytes=True).result}, r"result\.free_bytes"),
        ({"result": make_profile(role="both").result}, r"result\.role"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(make_profile().to_json() | change))
    with pytest.raises(UserError, match=complaint) as refused:
        read_profile(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_kind_than_wanted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_result(path, make_profile("step").to_json())
    with pytest.raises(UserError, match="llm"):
        read_profile(path, "llm")


def test_a_profile_with_a_field_left_out_is_refused(tmp_path: Path) -> None:
    path, document = tmp_path / "profile.json", make_profile().to_json()
    del document["settings"]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="floodplain profile writes it"):
        read_profile(path)
