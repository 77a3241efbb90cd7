"""Laws of all pictures: no text outside the figure or over a panel's head, and one colour for each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.demo.leases import FULL_SCENE
from floodplain.demo.relief import FULL_RELIEF
from floodplain.observe.demo_plots import draw_lending, draw_relief
from floodplain.observe.plots import draw_pareto, draw_timeline, draw_tpot, draw_ttft
from floodplain.observe.residence import STATES, spans_by_state
from floodplain.observe.strips import draw_beside_stock, draw_strip
from floodplain.observe.style import POLICY_COLOURS, colours_of, finding, make_figure, render, spread, styled
from floodplain.policy.registry import POLICIES
from tests.support.examples import examples

WAYS = ("fcfs", "AQUA's switch", "floodplain")
MODEL = "a-model-with-a-long-name-of-135M-parameters"
HARDWARE = "emulated-nvlink4, emulated-pcie5 on Intel(R) Xeon(R) Platinum 8480C Processor @ 2.90GHz, 2 cores"


def result_of(wait_s: float, num_requests: int = 24) -> dict[str, Any]:
    """A benchmark result with the keys of the pictures: each request waits, is computed, preempted, and decoded."""
    starts = [0.4 * i for i in range(num_requests)]
    rows = {
        "arrival_s": starts,
        "first_token_s": [start + wait_s for start in starts],
        "finished_s": [start + wait_s + 9.0 for start in starts],
        "on_device_s": [[[s + 0.9 * wait_s, s + wait_s + 3.0], [s + wait_s + 5.0, s + wait_s + 9.0]] for s in starts],
    }
    timeline = {"time_s": starts, "num_running": starts, "num_waiting": starts, "num_swapped": starts}
    return {
        "model_id": MODEL, "start_times": starts, "ttfts": [wait_s] * num_requests,
        "itls": [[0.1, 8.9]] * num_requests, "errors": ["", "cut"] + [""] * (num_requests - 2),
        "num_prompts": num_requests, "slo_attainment": 1.0 / (1.0 + wait_s), "p99_ttft_ms": 1e3 * wait_s,
        "median_ttft_ms": 1e3 * wait_s, "p99_tpot_ms": 400.0 + wait_s, "median_tpot_ms": 300.0,
        "median_e2el_ms": 9e3, "floodplain": {
            "hardware": {"name": HARDWARE}, "goals_ms": {"ttft": 4000.0, "tpot": 413.0}, "residence": rows,
            "bursts_s": [0.0, 11.0], "timeline": timeline,
        },
    }  # fmt: skip


RUNS = [(name, result_of(wait_s)) for name, wait_s in zip(WAYS, (32.0, 7.5, 5.7), strict=True)]
TIMES = [float(second) for second in range(55)]


def lending() -> dict[str, Any]:
    names = ("pool_bytes", "used_bytes", "lent_bytes", "peer_bytes", "host_bytes", "num_tokens")
    return {
        "scene": asdict(FULL_SCENE),
        "recalls": {"num": 4, "mean_s": 1.25, "num_forced": 0},
        "most_lent_bytes": 2**27,
        "samples": {"time_s": TIMES, **{name: [2**20 * (9 + second) for second in TIMES] for name in names}},
    }


def relief(num_drops: int = 1) -> dict[str, Any]:
    phases = ("dropping", "exchanging", "pipelined", "restoring")
    spans = [{"phase": phase, "from_s": 14.0 + 10 * i, "to_s": 24.0 + 10 * i} for i, phase in enumerate(phases)]
    totals = {"num_drops": num_drops, "num_restores": num_drops, "usable_s": 0.16, "restored_s": 6.99}
    names = ("used_blocks", "blocks", "num_running", "num_waiting")
    return {
        "scene": asdict(FULL_RELIEF), "totals": totals, "blocks": {"before": 192, "dropped": 544}, "failed": 2,
        "spans": spans if num_drops else [], "samples": {"time_s": TIMES, **dict.fromkeys(names, TIMES)},
        "requests": {"sent_s": [1.0, 20.0], "ttft_s": [0.5, None]},
    }  # fmt: skip


WHERE = f"{MODEL} on {HARDWARE}, two servers"
PICTURES: dict[str, Callable[[], Any]] = {
    "ttft": lambda: draw_ttft(RUNS),
    "ttft of one": lambda: draw_ttft(RUNS[:1]),
    "tpot": lambda: draw_tpot(RUNS),
    "pareto": lambda: draw_pareto(RUNS),
    "timeline": lambda: draw_timeline(RUNS),
    "strip": lambda: draw_strip(RUNS),
    "readme": lambda: draw_beside_stock(RUNS[0], RUNS[2]),
    "leases": lambda: draw_lending(lending(), WHERE),
    "cluster": lambda: draw_relief(relief(), WHERE),
    "cluster without a drop": lambda: draw_relief(relief(0), WHERE),
}


@cache
def picture(name: str) -> Any:
    return PICTURES[name]()


def boxes_of(figure: Any) -> Iterator[tuple[str, Any]]:
    """(name, extent) of each text and of each axis with its labels; the figure is drawn for that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with styled():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    renderer = canvas.get_renderer()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for panel in figure.axes:
        texts += [*panel.texts, panel.title, panel._left_title]
        for axis in (panel.xaxis, panel.yaxis):
            if (box := axis.get_tightbbox(renderer)) is not None:
                yield axis.get_label_text(), box
    yield from ((text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text())


def texts_outside(figure: Any) -> list[str]:
    """Texts that reach out of the figure by more than a pixel."""
    page = figure.bbox
    return [
        words
        for words, box in boxes_of(figure)
        if box.x0 < page.x0 - 1 or box.y0 < page.y0 - 1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1
    ]


def overlaps_head(figure: Any) -> bool:
    """Whether the upper panel reaches into the title, the subtitle or the key; the figure has been drawn."""
    renderer = figure.canvas.get_renderer()
    heads = [*figure.texts, *figure.legends]
    lowest = min(each.get_window_extent(renderer).y0 for each in heads)
    return bool(figure.axes[0].get_tightbbox(renderer).y1 > lowest)


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_clipped_and_the_head_stands_alone(name: str) -> None:
    figure = picture(name)
    assert texts_outside(figure) == []
    assert not overlaps_head(figure)


def test_text_that_is_too_wide_is_found_and_would_be_wrapped() -> None:
    long = "words " * 60
    with styled():
        figure, (panel,) = make_figure(long, long, key={f"{long[:40]}{i}": {"color": "k"} for i in range(5)})
        assert texts_outside(figure) == [] and not overlaps_head(figure)
        panel.text(0.5, 0.5, long, transform=panel.transAxes, in_layout=False)
    assert texts_outside(figure) == [long]


def test_the_picture_of_the_readme_is_small() -> None:
    assert len(render(picture("readme"), "png")) < 250_000


# -- colours -----------------------------------------------------------------------------------------------------------


def test_every_policy_has_a_colour_wherever_its_name_stands() -> None:
    assert set(POLICIES) <= set(POLICY_COLOURS)
    for policy in POLICIES:
        for names in ([policy, "other"], ["a run", f"policy={policy} rate=2"], ["x", "y", f"{policy}, again"]):
            assert POLICY_COLOURS[policy] in colours_of(names).values()
    assert colours_of(["fcfs", "floodplain"]) == {key: POLICY_COLOURS[key] for key in ("fcfs", "floodplain")}


@given(st.lists(st.sampled_from([*POLICY_COLOURS, "a", "b", "fcfs 2", "vLLM (FCFS)", "c"]), max_size=7, unique=True))
def test_up_to_seven_runs_have_different_colours(names: list[str]) -> None:
    colours = colours_of(names)
    assert list(colours) == names
    assert len(set(colours.values())) == len(names)


def test_ways_have_one_colour_in_all_pictures() -> None:
    expected = colours_of(WAYS)
    for name in ("ttft", "tpot", "timeline"):
        for panel in picture(name).axes:
            drawn = {str(line.get_label()): line.get_color() for line in panel.lines}
            assert {way: drawn[way] for way in WAYS if way in drawn} == {
                way: expected[way] for way in WAYS if way in drawn
            }
    (pareto,) = picture("pareto").axes
    assert {
        text.get_text().split("\n")[0]: text.get_color() for text in pareto.texts if "E2E" in text.get_text()
    } == expected
    assert {panel.get_title(loc="left"): panel._left_title.get_color() for panel in picture("strip").axes} == expected


# -- words and places --------------------------------------------------------------------------------------------------


def test_a_title_has_the_numbers_of_the_runs_which_no_line_separates_from_their_unit() -> None:
    runs = [(name, {"value": number}) for name, number in (("a", 1000.0), ("b", 250.0))]
    assert (
        finding("TTFT p99", "value", 1e-3, "s", runs) == "TTFT p99: a 1\N{NO-BREAK SPACE}s, b 0.25\N{NO-BREAK SPACE}s"
    )
    many = [(str(number), {"value": float(number)}) for number in range(1, 9)]
    assert finding("x", "value", 1.0, "s", many) == "x: 1 1\N{NO-BREAK SPACE}s, 8 8\N{NO-BREAK SPACE}s"
    assert finding("x", "other", 1.0, "s", many) == "x"


@given(st.lists(st.floats(0, 1), max_size=8))
def test_labels_keep_their_order_and_distance_within_the_panel(places: list[float]) -> None:
    gap = 0.1
    moved = spread(places, gap)
    order = sorted(range(len(places)), key=places.__getitem__)
    assert all(moved[above] - moved[below] >= gap - 1e-9 for below, above in pairwise(order))
    assert all(-1e-9 <= each <= 1 + 1e-9 for each in moved)


def test_labels_that_do_not_touch_stay() -> None:
    assert spread([0.9, 0.2, 0.5], 0.1) == [0.9, 0.2, 0.5]


LIVES = st.lists(st.floats(0, 100), min_size=2, max_size=9, unique=True).map(sorted)


@settings(max_examples=examples(100), deadline=None)
@given(LIVES, st.floats(0, 1), st.booleans())
def test_the_states_of_a_request_cover_its_life_once(edges: list[float], part: float, has_token: bool) -> None:
    begin, *inner, end = edges
    stays = [list(pair) for pair in zip(inner[::2], inner[1::2], strict=False)]
    first = begin + part * (end - begin) if has_token else None
    columns = {"arrival_s": [begin], "first_token_s": [first], "finished_s": [end], "on_device_s": [stays]}
    spans = spans_by_state(columns)
    every = sorted((span, state) for state in STATES for span in spans[state][0])
    joints = [span[1] for span, _ in every[:-1]]
    assert joints == [span[0] for span, _ in every[1:]] and (every[0][0][0], every[-1][0][1]) == (begin, end)
    for (from_s, to_s), state in every:
        is_on = any(low <= from_s and to_s <= high for low, high in stays)
        assert is_on == (state in ("prefill", "decoding"))
        assert (state in ("waiting", "prefill")) == (first is None or to_s <= first)
