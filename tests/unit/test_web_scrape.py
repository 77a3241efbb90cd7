"""Which format a scraper gets for its ``Accept`` header."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.web.scrape import prefers_open_metrics

OPEN, TEXT = "application/openmetrics-text", "text/plain"
PROMETHEUS = f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{TEXT};version=0.0.4;q=0.3,*/*;q=0.2"


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        (TEXT, False),
        (OPEN, True),
        (OPEN.upper(), True),
        (PROMETHEUS, True),
        (f"{OPEN}, {TEXT}", True),
        (f"{OPEN};q=0", False),
        (f"{OPEN};q=0, */*", False),
        (f"{OPEN};q=0.0,{TEXT};q=0", False),
        (f"{OPEN};q=0.1,{TEXT}", False),
        (f"{OPEN};q=0.1,text/*;q=0.2", False),
        (f"{OPEN};q=0.3,*/*;q=0.2", True),
        (f"{OPEN};version=0.0.1;q=0.1,{OPEN};version=1.0.0;q=0.9,{TEXT};q=0.5", True),
        (f"{TEXT};q=0,*/*", True),
        (f"{TEXT};q=0,application/*;q=0.1", True),
        (f"{TEXT};q=0", False),
        (f"{OPEN} ; Q = 0.5 , {TEXT};q=0.4", True),
        *[(f"{OPEN};q={wrong}", False) for wrong in ("", "nan", "inf", "-1", "2", "0.1234", "x", "1e9")],
        ("application/json", False),
    ],
)
def test_the_preferred_format_is_the_one_of_higher_quality(accept: str, is_open: bool) -> None:
    assert prefers_open_metrics(accept) is is_open


@given(st.integers(0, 1000), st.integers(0, 1000), st.booleans())
def test_no_excluded_format_is_chosen_while_another_is_accepted(first: int, second: int, is_swapped: bool) -> None:
    parts = [f"{OPEN};q={first / 1000:.3f}", f"{TEXT};q={second / 1000:.3f}"]
    accept = ", ".join(reversed(parts) if is_swapped else parts)
    assert prefers_open_metrics(accept) is (first > 0 and first >= second)


@given(st.text().filter(lambda accept: OPEN not in accept.lower()))
def test_the_last_format_of_any_header_is_chosen(accept: str) -> None:
    assert prefers_open_metrics(f"{accept},{OPEN}")
    assert not prefers_open_metrics(f"{accept},{TEXT}")
