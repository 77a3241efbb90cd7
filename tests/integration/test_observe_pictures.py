from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.observe.plots import draw_all, draw_pareto, draw_timeline, draw_tpot, draw_ttft, save_plots, to_svg
from floodplain.observe.report import render_report
from floodplain.observe.residence import residence_columns
from floodplain.observe.result import HardwareReport, RunInfo, benchmark_result
from floodplain.observe.strips import KEY, STATE_COLOURS, draw_beside_stock, draw_strip
from floodplain.observe.style import subtitle
from floodplain.observe.timeline import Timeline, TimelineSample
from floodplain.workload.records import RequestRecord
from tests.support.records import make_record


def run(name: str, wait_s: float, *, has_failure: bool = False) -> tuple[str, dict[str, Any]]:
    timeline = Timeline()
    for i in range(50):
        timeline.record(TimelineSample(float(i), min(i, 24), max(0, i - 24), 0, i, 100))
    records = [
        make_record(i + wait_s, i + wait_s + 1, sent_s=float(i), error="cut" if has_failure and i == 3 else None)
        for i in range(30)
    ]
    link = {
        "tier": "host", "name": "emulated-nvlink4", "emulated": True, "bandwidth": 1e9, "modelled_bandwidth": 2.5e11,
        "slowdown": 250.0, "source": "a paper <1>",
    }  # fmt: skip
    hardware = HardwareReport(name="emulated-nvlink4", emulated=True, links=(link,))
    goals = ("ttft:700", "tpot:50")
    info = RunInfo(backend="floodplain", model_id="tiny <model>", tokenizer_id="tiny", hardware=hardware, goodput=goals)
    result = benchmark_result(records, info, None, timeline.columns())
    result["floodplain"]["residence"] = residence_columns([life(record) for record in reversed(records)])
    return name, result


def life(record: RequestRecord) -> Lifecycle:
    """A request scheduled 0.25 s before its first token, preempted 0.25 s after it, swapped in 0.25 s later."""
    first_s, last_s = record.token_times_s
    request = Lifecycle(record.arrival_s, token_times_s=[first_s, last_s])
    request.record(EventKind.SCHEDULED, first_s - 0.25)
    request.record(EventKind.PREEMPTED, first_s + 0.25)
    request.record(EventKind.SWAPPED_IN, first_s + 0.5)
    request.record(EventKind.FINISHED, last_s)
    return request


RUNS = [run("FCFS & co", 2.0, has_failure=True), run("fair", 0.5)]


def test_the_axes_of_requests_have_whole_numbers() -> None:
    name, result = run("one", 0.5)
    few = {key: value[:21] if isinstance(value, list) and len(value) == 30 else value for key, value in result.items()}
    for figure, axis in ((draw_ttft([(name, few)]), "xaxis"), (draw_strip([(name, result)]), "yaxis")):
        ticks = getattr(figure.axes[-1], axis).get_majorticklocs()
        assert len(ticks) > 3 and all(float(tick).is_integer() for tick in ticks)


def test_saved_pictures_are_whole_files(tmp_path: Path) -> None:
    paths = save_plots(RUNS, tmp_path / "plots")
    assert [path.name for path in paths] == [
        "ttft.svg", "ttft.png", "tpot.svg", "tpot.png", "pareto.svg", "pareto.png", "timeline.svg", "timeline.png",
        "strip.svg", "strip.png",
    ]  # fmt: skip
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".png":
            assert data.startswith(b"\x89PNG\r\n\x1a\n")
            assert data.endswith(b"IEND\xaeB`\x82")
            assert len(data) > 10_000
        else:
            text = "".join(ElementTree.fromstring(data).itertext())
            assert "tiny <model> on emulated-nvlink4" in text
            assert "FCFS & co" in text


def lines_of(panel: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}


def test_a_picture_shows_the_numbers_and_marks_failures() -> None:
    first, whole = (lines_of(panel) for panel in draw_ttft(RUNS).axes)
    assert first["fair"][1] == pytest.approx([0.5] * 30)
    assert whole["fair"][1] == pytest.approx([1.5] * 30), "the price stands below the gain"
    assert 4 not in first["FCFS & co"][0]
    assert first["FCFS & co: failed (1)"] == ([4], [0.0])
    assert first["goal"][1] == pytest.approx([0.7, 0.7]) and "goal" not in whole
    timeline = draw_timeline(RUNS)
    assert timeline is not None
    kv = timeline.axes[-1].lines[0]
    assert max(kv.get_ydata()) == pytest.approx(49.0)


def test_the_pareto_picture_has_a_named_point_per_run_and_a_line_per_goal() -> None:
    pareto = draw_pareto(RUNS)
    assert pareto is not None
    (axes,) = pareto.axes
    points = {
        str(each.get_label()): list(each.get_offsets()[0]) for each in axes.collections if len(each.get_offsets()) == 1
    }
    assert points["FCFS & co"] == pytest.approx([2.0, 1000.0]) and points["fair"] == pytest.approx([0.5, 1000.0])
    horizontal, vertical = ([line.get_xdata()[0], line.get_ydata()[0]] for line in axes.lines)
    assert (horizontal[0], vertical[1]) == (pytest.approx(0.7), pytest.approx(50.0))
    words = [text.get_text() for text in axes.texts]
    assert {"goal 0.70 s", "goal 50 ms", "fair\nE2E p50 1.50 s"} <= set(words)
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0


def test_goals_that_differ_between_runs_are_not_drawn() -> None:
    (name, result), other = RUNS
    changed = result | {"floodplain": result["floodplain"] | {"goals_ms": {"ttft": 1.0}}}
    pareto = draw_pareto([(name, changed), other])
    assert pareto is not None and not pareto.axes[0].lines


def test_the_strip_has_a_row_for_each_request_in_order_of_arrival() -> None:
    strip = draw_strip(RUNS)
    assert strip is not None
    panels = strip.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["FCFS & co", "fair"]
    waiting, prefill, decoding, preempted = panels[1].lines
    for line, pairs in ((waiting, [(0, 0.25), (1, 1.25)]), (prefill, [(0.25, 0.5), (1.25, 1.5)])):
        xs, ys = list(line.get_xdata()), list(line.get_ydata())
        assert xs[:6] == pytest.approx([*pairs[0], math.nan, *pairs[1], math.nan], nan_ok=True)
        assert ys[:7] == pytest.approx([1, 1, math.nan, 2, 2, math.nan, 3], nan_ok=True)
    assert list(decoding.get_xdata())[:5] == pytest.approx([0.5, 0.75, math.nan, 1.0, 1.5], nan_ok=True)
    assert list(preempted.get_xdata())[:2] == [0.75, 1.0]


def test_states_have_the_colours_of_the_key_in_every_row() -> None:
    for figure in (draw_strip(RUNS), draw_beside_stock(*RUNS)):
        assert figure is not None
        (legend,) = figure.legends
        named = dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))
        assert list(named) == list(KEY)
        for panel in figure.axes:
            drawn = {str(line.get_label()): line.get_color() for line in panel.lines}
            assert drawn == {words: handle.get_color() for words, handle in named.items()}
    assert len(set(STATE_COLOURS.values())) == len(STATE_COLOURS)


def test_the_picture_beside_stock_has_both_shares_of_good_requests() -> None:
    figure = draw_beside_stock(*RUNS)
    assert figure is not None
    shares = [f"{100 * result['slo_attainment']:.0f} %" for _, result in RUNS]
    assert [panel.texts[0].get_text() for panel in figure.axes] == shares
    (name, result), other = RUNS
    assert draw_beside_stock((name, result | {"slo_attainment": None}), other) is None


def test_a_request_that_has_not_ended_has_no_row() -> None:
    with pytest.raises(ValueError, match="not ended"):
        residence_columns([Lifecycle(0.0)])


def test_the_page_states_emulation_once_and_only_for_emulated_runs() -> None:
    text = render_report("A", RUNS, {}, ways={"fair": "All requests <in turn>."}, figures={})
    assert text.count("slowed down 250 times") == 1
    assert "a paper &lt;1&gt;" in text
    assert "All requests &lt;in turn&gt;." in text
    real = benchmark_result([], RunInfo(backend="openai", model_id="m", tokenizer_id="t"))
    assert "emulated" not in render_report("A", [("real", real)], {}, figures={})


def test_the_table_has_a_column_for_each_run() -> None:
    head = re.search(r"<thead>(.*)</thead>", render_report("A", RUNS, {}, figures={}))
    assert head is not None
    assert re.findall(r"<th[^>]*>([^<]*)</th>", head.group(1)) == ["run", "FCFS &amp; co", "fair"]


def test_the_processor_is_named_once_where_a_link_is_emulated_on_it() -> None:
    runs = [(name, {"model_id": "m", "floodplain": {"hardware": {"name": name}}}) for name in ("cpu", "link on cpu")]
    assert subtitle(runs) == "m on link on cpu"
    assert subtitle(runs[:1]) == "m on cpu"


def test_pictures_are_reproducible_and_hardware_is_never_guessed() -> None:
    assert to_svg(draw_tpot(RUNS)) == to_svg(draw_tpot(RUNS))
    assert "hardware unknown" in subtitle([("x", {"model_id": "m"})])


def test_a_name_with_dollars_is_no_formula() -> None:
    names = ("a$x_^$b", "$$")
    for figure in draw_all([run(name, 0.5) for name in names]).values():
        assert all(name in to_svg(figure) for name in names)


def test_a_run_without_timeline_or_answers_still_draws() -> None:
    bare = benchmark_result([], RunInfo(backend="openai", model_id="m", tokenizer_id="t"))
    assert list(draw_all([("empty", bare)])) == ["ttft", "tpot"]
    assert "no request was answered" in render_report("Nothing", [("empty", bare)], {})


class Page(HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_is_self_contained_and_accessible() -> None:
    text = render_report("A <burst>", RUNS, {"CPU": "2 cores & more"}, ["First & foremost."])
    page = Page(text)
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in references)
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert page.tags.count("svg") == page.tags.count("figcaption") == 5
    assert dict(page.attributes)["lang"] == "en"
    assert ("role", "img") in page.attributes
    assert {"caption", "main", "title", "h1"} <= set(page.tags)
    assert "A &lt;burst&gt;" in text
    assert "2 cores &amp; more" in text
    assert "<burst>" not in text
