from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from floodplain.observe.plots import draw_all, save_plots, subtitle, to_svg
from floodplain.observe.report import render_report
from floodplain.observe.result import benchmark_result
from floodplain.observe.run_facts import HardwareReport, RunInfo
from floodplain.observe.timeline import Timeline, TimelineSample
from floodplain.workload.records import RequestRecord


def run(name: str, wait_s: float, *, has_failure: bool = False) -> tuple[str, dict[str, Any]]:
    timeline = Timeline()
    for i in range(50):
        timeline.record(TimelineSample(float(i), min(i, 24), max(0, i - 24), 0, i, 100))
    records = [
        RequestRecord(
            request_id=str(i),
            prompt_tokens=9,
            arrival_s=float(i),
            sent_s=float(i),
            finished_s=i + wait_s + 1,
            token_times_s=(i + wait_s, i + wait_s + 1),
            output_token_ids=None,
            text="",
            error="cut" if has_failure and i == 3 else None,
        )
        for i in range(30)
    ]
    hardware = HardwareReport(name="emulated-nvlink4", emulated=True)
    info = RunInfo(backend="floodplain", model_id="tiny <model>", tokenizer_id="tiny", hardware=hardware)
    return name, benchmark_result(records, info, None, timeline.columns())


RUNS = [run("FCFS & co", 2.0, has_failure=True), run("fair", 0.5)]


def test_saved_pictures_are_whole_files(tmp_path: Path) -> None:
    paths = save_plots(RUNS, tmp_path / "plots")
    assert [path.name for path in paths] == [
        "ttft.svg", "ttft.png", "tpot.svg", "tpot.png", "timeline.svg", "timeline.png",
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


def test_a_picture_shows_the_numbers_and_marks_failures() -> None:
    (axes,) = draw_all(RUNS)["ttft"].axes
    drawn = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn["fair"][1] == pytest.approx([0.5] * 30)
    assert 4 not in drawn["FCFS & co"][0]
    assert drawn["FCFS & co: failed (1)"] == ([4], [0.0])
    kv = draw_all(RUNS)["timeline"].axes[-1].lines[0]
    assert max(kv.get_ydata()) == pytest.approx(49.0)


def test_pictures_are_reproducible_and_hardware_is_never_guessed() -> None:
    assert to_svg(draw_all(RUNS)["tpot"]) == to_svg(draw_all(RUNS)["tpot"])
    assert "hardware unknown" in subtitle([("x", {"model_id": "m"})])


def test_a_run_without_timeline_or_answers_still_draws() -> None:
    bare = benchmark_result([], RunInfo(backend="openai", model_id="m", tokenizer_id="t"))
    assert list(draw_all([("empty", bare)])) == ["ttft", "tpot"]
    assert "no request was answered" in render_report("Nothing", [("empty", bare)], {})


class Page(HTMLParser):
    """Collects what matters of a page."""

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
    assert page.tags.count("svg") == page.tags.count("figcaption") == 3
    assert dict(page.attributes)["lang"] == "en"
    assert ("role", "img") in page.attributes
    assert {"caption", "main", "title", "h1"} <= set(page.tags)
    assert "A &lt;burst&gt;" in text
    assert "2 cores &amp; more" in text
    assert "<burst>" not in text
