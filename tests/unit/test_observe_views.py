from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from floodplain.observe.report import explain, inline_svg
from floodplain.observe.table import format_number, format_table, lookup, summary_table
from floodplain.observe.timeline import Timeline, TimelineSample, client_timeline
from tests.support.records import make_record


@given(st.integers(2, 20), st.integers(1, 300))
def test_a_timeline_is_bounded_evenly_spaced_and_keeps_both_ends(max_samples: int, count: int) -> None:
    timeline = Timeline(max_samples)
    for i in range(count):
        timeline.record(TimelineSample(float(i), i, 0))
    times = [sample.time_s for sample in timeline.samples()]
    assert len(times) <= max_samples
    assert (times[0], times[-1]) == (0.0, count - 1.0)
    assert times == sorted(set(times))
    assert len({b - a for a, b in pairwise(times[:-1])}) <= 1
    if count <= max_samples - 1:
        assert len(times) == count
    elif max_samples > 3:
        assert len(times) >= max_samples // 2


def test_columns_count_time_from_the_start() -> None:
    timeline = Timeline()
    timeline.record(TimelineSample(5.0, 1, 2, 3, 4, 10))
    assert timeline.columns(start_s=3.0) == {
        "time_s": [2.0], "num_running": [1], "num_waiting": [2], "num_swapped": [3],
        "kv_used_blocks": [4], "kv_total_blocks": [10],
    }  # fmt: skip
    assert Timeline().columns()["time_s"] == []


def test_a_client_timeline_counts_requests_that_wait_for_a_first_token() -> None:
    columns = client_timeline([make_record(2.0, 4.0), make_record(sent_s=1.0, finished_s=3.0)])
    assert columns == {
        "time_s": [0.0, 1.0, 2.0, 3.0, 4.0],
        "num_running": [0, 0, 1, 1, 0],
        "num_waiting": [1, 2, 1, 0, 0],
    }


def test_numbers_are_short_and_missing_ones_are_marked() -> None:
    shown = {None: "-", 0.0: "0", 12345.6: "12,346", 12.34: "12.3", 1.234: "1.23", 0.01234: "0.012", 7.0: "7"}
    assert {value: format_number(value) for value in shown} == shown
    assert format_number(float("nan")) == "-"


def test_table_columns_line_up() -> None:
    lines = format_table(["run", "x"], [["long name", "1"], ["b", "22.5"]]).splitlines()
    assert lines == ["run           x", "---------  ----", "long name     1", "b          22.5"]


def test_a_cell_of_a_table_neither_breaks_its_line_nor_moves_the_cursor() -> None:
    lines = format_table(["lease", "from"], [["a\nb", "gpu\x1b[2J"], ["c", "d"]]).split("\n")
    assert len(lines) == 4
    assert lines[2].split() == [r"a\u000ab", r"gpu\u001b[2J"]
    assert len({len(line) for line in lines}) == 1


def test_summary_reads_any_result_and_leaves_gaps_where_keys_are_missing() -> None:
    result = {"median_ttft_ms": 1500.0, "floodplain": {"preemptions": None}}
    headings, rows = summary_table([("r", result), ("s", {})])
    assert headings == ["run", "r", "s"]
    assert rows[:2] == [["TTFT p50 (s)", "1.50", "-"], ["TTFT p99 (s)", "-", "-"]]
    assert lookup({"a": {"b": 1}}, "a.b") == 1
    assert lookup({"a": 3}, "a.b") is None


def result(**changes: Any) -> dict[str, Any]:
    base = {"completed": 9, "failed": 0, "median_ttft_ms": 200.0, "p90_ttft_ms": 3000.0, "max_ttft_ms": 4000.0}
    return base | changes


def test_the_explanation_states_only_what_was_measured() -> None:
    plain = explain("fcfs", result())
    assert "0.20 s" in plain
    assert "pause" not in plain
    assert "failed" not in plain
    full = explain(
        "fcfs",
        result(
            failed=2,
            floodplain={"max_token_gap_s": 1.5, "timeline": {"num_waiting": [0, 28, 30], "num_swapped": [0, 3, 0]}},
        ),
    )
    assert "31 requests were off the device" in full
    assert "2 requests failed" in full
    assert "1.50 s" in full
    assert "no request was answered; 3 failed" in explain("x", {"completed": 0, "failed": 3})


def test_inlined_pictures_have_ids_of_their_own() -> None:
    svg = '<?xml?><!DOCTYPE x>\n<svg a="1"><metadata>http://x</metadata><g id="p"/><use href="#p" c="url(#p)"/></svg>\n'
    inlined = inline_svg(svg, "one", 'say "it"')
    assert re.search(r'id="one-p".*href="#one-p" c="url\(#one-p\)"', inlined)
    assert inlined.startswith('<svg role="img" aria-label="say &quot;it&quot;" a="1">')
    assert "http" not in inlined
