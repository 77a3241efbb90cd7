"""A profile's plot shows tries, limits and result; missing values are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cli.main import main
from floodplain.files.profile import Profile
from floodplain.observe.profile import PAPER_SWAP_GB, describe_profile, draw_profile, format_fact
from floodplain.observe.strict_json import save_result
from tests.support.examples import examples
from tests.support.refusals import Refuse

GB = 10**9
MEDIA_TRIES = [
    {"batch": 1, "verdict": "fits", "throughput": 1.0, "spread": 0.02, "free_bytes": 50 * GB},
    {"batch": 4, "verdict": "out of memory", "throughput": None, "spread": None, "free_bytes": None},
    {"batch": 2, "verdict": "fits", "throughput": 1.5, "spread": None, "free_bytes": 40 * GB},
]
LLM_TRIES = [
    {"rate_rps": rate, "verdict": verdict, "ttft_p99_s": rate / 3, "itl_p99_s": 0.05, "peak_kv_bytes": int(rate * GB)}
    for rate, verdict in ((1.0, "met"), (2.0, "met"), (4.0, "missed"))
]
SWAP_TRIES = [{"factor": factor, "needs_bytes": int(factor) * GB} for factor in (2.0, 3.0, 5.0)]
STEP_TRIES = [{"step_s": 0.01 * k, "fitted_s": 0.011 * k} for k in range(1, 9)]
RESULTS: dict[str, dict[str, Any]] = {
    "media": {"batch": 2, "throughput": 1.5, "peak_bytes": 40 * GB, "free_bytes": 40 * GB, "role": "producer",
              "threshold_bytes": 10 * GB, "limit_batch": 4},
    "llm": {"rate_rps": 2.0, "peak_kv_bytes": 2 * GB, "kv_bytes": 30 * GB, "free_bytes": 28 * GB, "role": "producer"},
    "swap": {"stable_rate_rps": 2.0, "needs_bytes": 5 * GB},
    "step": {"base_s": 0.01, "decode_s": 0.001, "prefill_token_s": 1e-5},
}  # fmt: skip
TRIES: dict[str, list[dict[str, Any]]] = {
    "media": MEDIA_TRIES, "llm": LLM_TRIES, "swap": SWAP_TRIES, "step": STEP_TRIES,
}  # fmt: skip


def make(kind: str, tries: list[dict[str, Any]] | None = None, subject: str = "a model", **settings: Any) -> Profile:
    rows = TRIES[kind] if tries is None else tries
    return Profile(kind=kind, subject=subject, machine="a laptop", settings=settings, result=RESULTS[kind], tries=rows)


def lines_of(panel: Any) -> list[list[tuple[float, float]]]:
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in panel.get_lines()]


def test_media_show_throughput_and_free_memory_over_the_batch() -> None:
    figure = draw_profile(make("media"))
    assert figure is not None
    throughput, free = figure.axes
    assert [(1.0, 1.0), (2.0, 1.5)] in lines_of(throughput), "in their order, without the batch that did not fit"
    assert [(1.0, 50.0), (2.0, 40.0)] in lines_of(free) and free.get_ylabel() == "free memory\n(GB)"
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["knee", "out of memory", "threshold of a producer"]


def test_llms_show_latencies_with_their_goals_over_the_rate() -> None:
    figure = draw_profile(make("llm", ttft_ms=1000.0, itl_ms=100.0))
    assert figure is not None
    ttft, itl, free = figure.axes
    assert [(0, 1.0), (1, 1.0)] in lines_of(ttft) and [(0, 100.0), (1, 100.0)] in lines_of(itl)
    assert [(1.0, 29.0), (2.0, 28.0), (4.0, 26.0)] in lines_of(free)
    assert "missed the goals" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_goals_of_a_goodput_stand_alone() -> None:
    figure = draw_profile(make("llm", ttft_ms=1000.0, itl_ms=100.0, goodput=["ttft:500", "tpot:70"]))
    assert figure is not None
    ttft, itl, _ = figure.axes
    assert [(0, 0.5), (1, 0.5)] in lines_of(ttft)
    assert not any(line[0] == (0, 100.0) for line in lines_of(itl))


@pytest.mark.parametrize(("subject", "has_papers"), [("dummy:Yi-34B", True), ("smollm2", False)])
def test_the_papers_swap_space_stands_beside_that_of_its_model(subject: str, has_papers: bool) -> None:
    figure = draw_profile(make("swap", subject=subject))
    assert figure is not None
    lines = lines_of(figure.axes[0])
    assert [(2.0, 2.0), (3.0, 3.0), (5.0, 5.0)] in lines
    assert (list(PAPER_SWAP_GB.items()) in lines) is has_papers


def test_steps_show_what_was_measured_against_what_was_fitted() -> None:
    figure = draw_profile(make("step"))
    assert figure is not None
    (panel,) = figure.axes
    drawn = [x for point in panel.collections[0].get_offsets() for x in point]
    assert drawn == pytest.approx([x for k in range(1, 9) for x in (10.0 * k, 11.0 * k)])
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


def test_what_is_not_there_is_not_drawn() -> None:
    for kind in TRIES:
        assert draw_profile(make(kind, [])) is None
        assert draw_profile(make(kind, [{"verdict": "met"}])) is None
    figure = draw_profile(make("llm", [{"rate_rps": 1.0, "ttft_p99_s": 0.5, "itl_p99_s": None}]))
    assert figure is not None and [panel.get_ylabel() for panel in figure.axes] == ["TTFT p99\n(s)"]


PRUNED = st.sampled_from(sorted(TRIES)).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        st.lists(st.sampled_from(TRIES[kind]).flatmap(lambda row: st.sets(st.sampled_from(sorted(row))).map(
            lambda gone: {key: value for key, value in row.items() if key not in gone}
        )), max_size=5),
    )
)  # fmt: skip


@settings(max_examples=examples(25), deadline=None)
@given(PRUNED)
def test_any_part_of_a_profile_can_be_drawn(drawn: tuple[str, list[dict[str, Any]]]) -> None:
    kind, tries = drawn
    figure = draw_profile(make(kind, tries))
    assert figure is None or figure.axes


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Profile], str]:
    def to_file(profile: Profile) -> str:
        save_result(tmp_path / "p.json", profile.to_json())
        return str(tmp_path / "p.json")

    return to_file


def test_show_draws_into_a_file(
    save: Callable[[Profile], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "show", save(make("media")), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    shown, told = capsys.readouterr()
    assert "media profile of a model" in shown and told == f"floodplain: the picture is in {tmp_path / 'p.png'}\n"


@pytest.mark.parametrize(
    ("tries", "plot", "told"),
    [
        (MEDIA_TRIES, "p.jpeg", "must end in one of .png, .svg, .pdf"),
        ([], "p.png", "has no tries with the numbers that are drawn for kind media"),
        ([{"batch": 10**400, "throughput": 1.0}], "p.png", "cannot be drawn"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    tries: list[dict[str, Any]], plot: str, told: str, save: Callable[[Profile], str], tmp_path: Path, refuse: Refuse
) -> None:
    assert told in refuse("profile", "show", save(make("media", tries)), "--plot", str(tmp_path / plot))
    assert not (tmp_path / plot).exists()


# -- a profile as text -------------------------------------------------------------------------------------------------


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
