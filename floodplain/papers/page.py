"""The page of findings: every claim beside what is simulated, a picture a figure, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.files.results import write_result
from floodplain.observe.strict_json import save_result
from floodplain.observe.style import LINES, MARKERS, area, colours_of, make_figure, small_png, styled
from floodplain.observe.table import format_number, format_table
from floodplain.papers.claims import TOLERANCE, Claim, Curve, Curves, Finding, Picture, Verdict
from floodplain.papers.registry import PAPERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

PAGE, DATA, IMAGES = "papers.md", "papers.json", "images"
"""Files, and the folder of pictures, under ``--out``."""
HEADINGS = ("claim", "paper", "ours", "ratio", "verdict", "Floodplain's own way")
MANY_POINTS = 100
"""Curves with more points have no markers."""
WIDTH_INCHES = 6.0
_RULE = """\
Each figure is simulated with the paper's models, GPUs, workload and baselines. Nothing here was measured on those GPUs.

A claim is *reproduced* if ours differs from it by a factor of at most {tolerance}, at the value that is taken for
what the paper does not tell; for *at least* and *at most* only one side counts. It is reproduced *only with* an
assumption if another value of that comes as near, if the claim lies between the results of two values, if a
parameter was fitted to it, or if it is decided by something that is assumed, not simulated. Ours is the mean over
the seeds {seeds}. In brackets are the least and the largest result: of the values tried, else of the seeds. The
last column is the same number under Floodplain's own way, where there is one."""


def write_page(folder: Path, findings: Sequence[Finding], seeds: Sequence[int]) -> None:
    """Write the page, its pictures and its JSON. Raises WriteFailed."""
    for finding in findings:
        write_result(folder / picture_path(finding), small_png(draw(finding)))
    write_result(folder / PAGE, make_page(findings, seeds))
    save_result(folder / DATA, to_document(findings, seeds))


def picture_path(finding: Finding) -> Path:
    """The picture of a figure, relative to the page."""
    return Path(IMAGES, f"papers-{finding.figure.name}.png")


def to_document(findings: Sequence[Finding], seeds: Sequence[int]) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "seeds": list(seeds),
        "tolerance": TOLERANCE,
        "figures": {finding.figure.name: _figure_document(finding) for finding in findings},
    }


def _figure_document(finding: Finding) -> dict[str, Any]:
    figure = finding.figure
    claims = [
        asdict(claim) | {"ratio": claim.ratio, "verdict": claim.verdict.value, "condition": claim.condition}
        for claim in finding.claims
    ]
    told = {"shows": figure.shows, "setting": figure.setting, "assumptions": list(figure.assumptions)}
    return told | {"claims": claims}


def claim_rows(claims: Sequence[Claim]) -> list[list[str]]:
    """One row of ``HEADINGS`` for each claim."""
    return [
        [
            claim.statement.text,
            _with_bound(claim),
            _with_range(claim),
            format_number(claim.ratio),
            _verdict(claim),
            "-" if claim.own is None else _number(claim.own, claim.statement.unit),
        ]
        for claim in claims
    ]


def make_page(findings: Sequence[Finding], seeds: Sequence[int]) -> str:
    """The page as Markdown."""
    counts = Counter(claim.verdict for finding in findings for claim in finding.claims)
    totals = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    what = "--all" if len(findings) > 1 else findings[0].figure.name
    parts = [
        "# The papers' figures",
        f"```\nfloodplain reproduce {what} --seeds {' '.join(map(str, seeds))} --out docs\n```",
        _RULE.format(tolerance=f"{TOLERANCE:g}", seeds=", ".join(map(str, seeds))),
        f"{sum(counts.values())} claims: {totals}.",
        _table(("figure", "shows", "verdicts"), [_overview(finding) for finding in findings]),
    ]
    for paper in dict.fromkeys(finding.figure.paper for finding in findings):
        parts.append(f"## {PAPERS[paper]}")
        parts += [_section(finding) for finding in findings if finding.figure.paper == paper]
    return "\n\n".join(parts) + "\n"


def _overview(finding: Finding) -> list[str]:
    name = finding.figure.name
    return [f"[{name}](#{name})", finding.figure.shows, _count_verdicts(finding)]


def _count_verdicts(finding: Finding) -> str:
    counts = Counter(claim.verdict for claim in finding.claims)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


def _section(finding: Finding) -> str:
    figure = finding.figure
    rows = "\n".join(f"- {text}" for text in figure.assumptions)
    parts = [f"### {figure.name}", f"{figure.shows}. {figure.setting}.", _table(HEADINGS, claim_rows(finding.claims))]
    if figure.unknown:
        tried = "\n".join(f"- {label}{' (ours)' if label == figure.default else ''}" for label in figure.unknown.values)
        parts.append(f"The paper does not tell the {figure.unknown.name}; tried are\n\n{tried}")
    parts += [f"![{figure.name}]({picture_path(finding).as_posix()})", f"Assumptions that are ours:\n\n{rows}"]
    return "\n\n".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _verdict(claim: Claim) -> str:
    return f"only with {claim.condition}" if claim.condition else claim.verdict.value


def _with_bound(claim: Claim) -> str:
    number, bound = _number(claim.statement.paper, claim.statement.unit), claim.statement.bound
    return number if bound == "about" else f"{bound} {number}"


def _with_range(claim: Claim) -> str:
    ours, swept = _number(claim.ours, claim.statement.unit), claim.sweep.values() or claim.spread
    low, high = format_number(min(swept)), format_number(max(swept))
    return ours if low == high else f"{ours} ({low} to {high})"


def _number(value: float, unit: str) -> str:
    return f"{format_number(value)}{unit}" if unit in ("x", "%") else f"{format_number(value)} {unit}".rstrip()


def draw(finding: Finding) -> Drawing:
    """The picture of a figure: the default of what the paper does not tell, with the first seed."""
    picture, marks = finding.picture, _marks(finding.picture)
    key = {name: area(mark["color"]) if _is_bars(picture, name) else mark for name, mark in marks.items()}
    with styled():
        drawing, panels = make_figure(
            finding.figure.shows, f"{finding.figure.name}, simulated; claims: {_count_verdicts(finding)}",
            len(picture.panels), key=key if len(key) > 1 else None, width=WIDTH_INCHES,
        )  # fmt: skip
        for panel, (label, curves) in zip(panels, picture.panels.items(), strict=True):
            panel.set_ylabel(label)
            _draw_curves(panel, curves, marks)
        panels[-1].set_xlabel(picture.x_label)
        drawing.align_ylabels(panels)
    return drawing


Marks = Mapping[str, Mapping[str, Any]]
"""The line and marker of each name, the same in all panels."""


def _marks(picture: Picture) -> Marks:
    curves = {name: curve for panel in picture.panels.values() for name, curve in panel.items()}
    return {
        name: {
            "color": colour,
            "marker": MARKERS[i % len(MARKERS)] if len(curves[name][1]) <= MANY_POINTS else None,
            "markersize": 3.5,
            "linestyle": LINES[i % len(LINES)],
            "linewidth": 1.2,
        }
        for i, (name, colour) in enumerate(colours_of(curves).items())
    }


def _is_bars(picture: Picture, name: str) -> bool:
    return any(name in panel and _has_words(panel[name]) for panel in picture.panels.values())


def _has_words(curve: Curve) -> bool:
    return bool(curve[0]) and isinstance(curve[0][0], str)


def _draw_curves(panel: Axes, curves: Curves, marks: Marks) -> None:
    bars = {name: curve for name, curve in curves.items() if _has_words(curve)}
    if bars:
        _draw_bars(panel, bars, marks)
    for name, (places, values) in curves.items():
        if name not in bars:
            panel.plot(places, values, label=name, **marks[name])
    panel.set_ylim(bottom=0)


def _draw_bars(panel: Axes, bars: Curves, marks: Marks) -> None:
    places = list(dict.fromkeys(place for labels, _ in bars.values() for place in labels))
    width = 0.8 / len(bars)
    for number, (name, (labels, values)) in enumerate(bars.items()):
        lefts = [places.index(label) + (number - (len(bars) - 1) / 2) * width for label in labels]
        panel.bar(lefts, values, width, label=name, color=marks[name]["color"])
    panel.set_xticks(range(len(places)), [str(place) for place in places])


def describe(findings: Sequence[Finding]) -> str:
    """The findings for a terminal."""
    return "\n\n".join(
        f"{finding.figure.name}: {finding.figure.shows}\n{format_table(HEADINGS, claim_rows(finding.claims))}"
        for finding in findings
    )
