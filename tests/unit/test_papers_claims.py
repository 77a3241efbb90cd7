"""Claims: the rule of verdicts and its laws, the registry, and the page, which leaves no figure and no claim out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.papers.claims import TOLERANCE, Bound, Claim, Figure, Finding, Measured, Picture, Statement, Verdict
from floodplain.papers.page import make_page, picture_path, to_document, write_page
from floodplain.papers.registry import FIGURES, PAPERS, figure_named

JUST = 1.0 - 1e-9


def claim_of(
    ours: float,
    sweep: Mapping[str, float] | None = None,
    *,
    bound: Bound = "about",
    fitted: str | None = None,
    assumed: str | None = None,
) -> Claim:
    statement, unknown = (
        Statement("gain", 4.0, "gain", bound=bound, fitted=fitted, assumed=assumed),
        "rate" if sweep else None,
    )
    return Claim(statement=statement, ours=ours, spread=(ours, ours), sweep=sweep or {}, unknown=unknown, own=None)


def same_finding(figure: Figure, factor: float) -> Finding:
    """What comes out if every run finds ``factor`` times what the paper says."""
    quantities = {statement.quantity: factor * statement.paper for statement in figure.statements}
    quantities |= {statement.own: factor * statement.paper for statement in figure.statements if statement.own}
    picture = Picture("request", {"s": {"ours": ([1.0, 2.0], [3.0, 4.0]), "bars": (["a"], [1.0])}})
    run = Measured(quantities, picture)
    return figure.judge(dict.fromkeys(figure.list_runs([0, 1]), run))


@pytest.mark.parametrize("factor", [1 / TOLERANCE / JUST, 1.0, TOLERANCE * JUST])
def test_a_claim_within_the_tolerance_is_reproduced(factor: float) -> None:
    assert claim_of(4.0 * factor).verdict is Verdict.REPRODUCED
    assert claim_of(4.0 * factor, fitted="bandwidth").verdict is Verdict.WITH_ASSUMPTION  # never by a fit to itself
    assert claim_of(4.0 * factor, fitted="bandwidth").condition == "bandwidth, fitted to this claim"
    assert claim_of(4.0 * factor, assumed="contention").verdict is Verdict.WITH_ASSUMPTION  # nor by what is assumed
    assert claim_of(4.0 * factor, assumed="contention").condition == "contention"


@pytest.mark.parametrize("factor", [0.1, JUST / TOLERANCE, TOLERANCE / JUST, 9.0])
def test_a_claim_outside_the_tolerance_is_not(factor: float) -> None:
    assert claim_of(4.0 * factor).verdict is Verdict.NOT_REPRODUCED
    assert claim_of(4.0 * factor).condition == ""


@pytest.mark.parametrize(
    ("sweep", "verdict", "condition"),
    [
        ({"low": 1.0, "mid": 3.9, "high": 9.0}, Verdict.WITH_ASSUMPTION, "rate mid"),
        ({"low": 1.0, "high": 9.0}, Verdict.WITH_ASSUMPTION, "rate, in between"),
        ({"low": 1.0, "high": 3.5}, Verdict.WITH_ASSUMPTION, "rate high"),
        ({"low": 1.0, "high": 3.0}, Verdict.NOT_REPRODUCED, ""),
        ({"low": 6.0, "high": 9.0}, Verdict.NOT_REPRODUCED, ""),
    ],
)
def test_an_assumption_helps_if_its_range_holds_the_claim(
    sweep: dict[str, float], verdict: Verdict, condition: str
) -> None:
    claim = claim_of(100.0, sweep)
    assert (claim.verdict, claim.condition) == (verdict, condition)


@pytest.mark.parametrize(("bound", "good", "bad"), [("at least", 400.0, 3.0), ("at most", 0.04, 5.1)])
def test_a_one_sided_claim_holds_on_its_side(bound: Bound, good: float, bad: float) -> None:
    assert claim_of(good, bound=bound).verdict is Verdict.REPRODUCED
    assert claim_of(bad, bound=bound).verdict is Verdict.NOT_REPRODUCED


def test_ours_is_the_mean_of_the_default_and_the_sweep_that_of_each_value() -> None:
    figure = figure_named("aqua-1")
    picture = Picture("", {})
    numbers = {(label, seed): len(label) + 10.0 * seed for label, seed in figure.list_runs([0, 1])}
    keys = {name for one in figure.statements for name in (one.quantity, one.own) if name}
    runs = {run: Measured(dict.fromkeys(keys, value), picture) for run, value in numbers.items()}
    claim = figure.judge(runs).claims[0]
    assert claim.ours == len(figure.default) + 5.0 and claim.spread == (claim.ours - 5.0, claim.ours + 5.0)
    assert figure.unknown is not None
    assert claim.sweep == {label: len(label) + 5.0 for label in figure.unknown.values}


def test_every_figure_says_what_it_assumes_and_what_its_unknown_is() -> None:
    for name, figure in FIGURES.items():
        assert name == figure.name and figure.paper in PAPERS
        assert figure.statements and figure.assumptions
        assert figure.unknown is None or figure.unknown.default in figure.unknown.values


def test_an_unknown_figure_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match="no figure is called 'aqua-99'; there are aqua-1, "):
        figure_named("aqua-99")
    assert figure_named("AQUA-1") is FIGURES["aqua-1"]


def test_the_page_has_every_figure_claim_assumption_and_picture(tmp_path: Path) -> None:
    findings = [same_finding(figure, 1.0) for figure in FIGURES.values()]
    page = make_page(findings, [0, 1])
    assert "floodplain reproduce --all --seeds 0 1 --out" in page
    for figure in FIGURES.values():
        assert f"### {figure.name}\n" in page and f"](#{figure.name})" in page
        assert all(f"| {statement.text} | " in page for statement in figure.statements)
        assert all(f"- {text}" in page for text in figure.assumptions)
    write_page(tmp_path, findings[:1], [0, 1])
    drawn = tmp_path / picture_path(findings[0])
    assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.stat().st_size < 200_000
    assert f"({picture_path(findings[0])})" in (tmp_path / "papers.md").read_text()
    assert (tmp_path / "papers.json").exists()


def test_the_page_counts_what_was_found() -> None:
    figures = list(FIGURES.values())
    claims = sum(len(figure.statements) for figure in figures)
    sided = sum(statement.bound != "about" for figure in figures for statement in figure.statements)
    far = make_page([same_finding(figure, 100.0) for figure in figures], [0])
    assert f"{claims} claims: " in far
    document = to_document([same_finding(figure, 100.0) for figure in figures], [0])
    verdicts = [each["verdict"] for figure in document["figures"].values() for each in figure["claims"]]
    assert verdicts.count("not reproduced") >= claims - sided


COMMITTED = Path(__file__).parents[2] / "docs" / "papers.md"


def test_the_committed_page_has_all_figures_as_they_are_described_now() -> None:
    """A section is made again when its figure, its claims or its assumptions change."""
    page = COMMITTED.read_text()
    _, *sections = page.split("\n### ")
    assert [section.partition("\n")[0] for section in sections] == list(FIGURES)
    for section, figure in zip(sections, FIGURES.values(), strict=True):
        assert f"\n{figure.shows}. {figure.setting}.\n" in section
        claims = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
        assert claims[2:] == [statement.text for statement in figure.statements]
        assert section.split("Assumptions that are ours:\n\n")[1].partition("\n\n")[0].splitlines() == [
            f"- {text}" for text in figure.assumptions
        ]
        assert (COMMITTED.parent / "images" / f"papers-{figure.name}.png").is_file()


def test_the_committed_page_counts_its_verdicts() -> None:
    page = COMMITTED.read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 5]
    verdicts = [row[4] for row in rows if row[0] not in ("| claim", "| ---")]
    begins = [verdict.value.removesuffix(" an assumption") for verdict in Verdict]
    counts = [sum(each.startswith(begin) for each in verdicts) for begin in begins]
    totals = ", ".join(f"{count} {verdict}" for count, verdict in zip(counts, Verdict, strict=True))
    assert f"\n{len(verdicts)} claims: {totals}.\n" in page
