"""A profile as text: sizes in readable units, and a row for each try."""

from __future__ import annotations

import pytest

from floodplain.files.profile import Profile
from floodplain.observe.profile import describe_profile, format_fact


@pytest.mark.parametrize(
    ("value", "text"),
    [(10 * 10**9, "10 GB"), (-1_500_000, "-1.5 MB"), (999, "999 B"), (0, "0 B"), (393480 * 1024, "402.9 MB")],
)
def test_sizes_have_four_digits_of_the_largest_unit(value: int, text: str) -> None:
    assert format_fact("free_bytes", value) == text


def test_values_of_other_keys_are_numbers_and_what_is_missing_is_empty() -> None:
    assert [format_fact("rate", each) for each in (1.23456, 3, None, True)] == ["1.235", "3", "", "True"]


def test_result_errors_and_tries_are_shown_under_what_was_measured() -> None:
    profile = Profile(
        kind="media",
        subject="sd-3",
        machine="a GPU",
        settings={},
        result={"batch": 8, "free_bytes": 30 * 10**9},
        errors={"spread": 0.02, "of": {"each": 1.5}},
        tries=[{"batch": 4, "throughput": 1.0}, {"batch": 8, "peak_bytes": 2000}],
    )
    head, facts, tries = describe_profile(profile).split("\n\n")
    assert head.startswith("media profile of sd-3, measured on a GPU, ")
    assert {tuple(line.split(maxsplit=1)) for line in facts.splitlines()[2:]} == {
        ("batch", "8"), ("free_bytes", "30 GB"), ("spread", "0.02"), ("of.each", "1.5")
    }  # fmt: skip
    assert [line.split() for line in tries.splitlines()[2:]] == [["4", "1"], ["8", "2", "kB"]]
