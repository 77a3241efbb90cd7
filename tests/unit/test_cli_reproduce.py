"""``floodplain reproduce``: a figure's claims, its page, and flags that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from floodplain.cli.main import main
from floodplain.papers.aqua_bursts import A100, Guess, measure_burst
from floodplain.papers.registry import FIGURES
from floodplain.papers.serving import Lengths
from tests.support.refusals import Refuse

SMALL = replace(A100, num_before=3, burst_s=2.0, lengths=Lengths((600, 900), (20, 40), 2048))


def test_a_figure_is_the_same_for_the_same_seed() -> None:
    runs = [measure_burst(SMALL, Guess(1.0), seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    for name in ("aqua-1", "aqua-8", "aqua-13"):
        wanted = {key for one in FIGURES[name].statements for key in (one.quantity, one.own) if key}
        assert wanted <= set(runs[0].quantities)


def test_the_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FIGURES)
    assert main(["reproduce", "--list", "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(FIGURES)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "name one figure, or give one of --all and --list"),
        (["--list", "--out", "page"], "--list writes no page: leave --out out"),
        (["aqua-1", "--all"], "name one figure"),
        (["aqua-99"], "no figure is called 'aqua-99'; there are aqua-1"),
        (["aqua-1", "--seeds", "1", "1"], "--seeds must be"),
        (["aqua-1", "--seeds", "-1"], "--seeds must be"),
        (["aqua-1", "--out", "/dev/null/page"], "--out /dev/null/page/papers.md cannot be written"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], words: str, refuse: Refuse) -> None:
    assert words in refuse("reproduce", *argv)
