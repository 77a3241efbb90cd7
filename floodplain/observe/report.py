"""One self-contained web page about a few runs: a summary, a table, pictures, the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from floodplain.observe.plots import draw_all, to_svg
from floodplain.observe.style import Run, subtitle
from floodplain.observe.table import format_number, lookup, summary_rows, transposed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS: Mapping[str, str] = {
    "ttft": "How long each request waited for its first token. A hill is a queue: requests that came later waited for "
    "those before them.",
    "tpot": "How fast text came once it had begun. Low and flat reads smoothly; peaks are pauses or a crowded batch.",
    "pareto": "The wait for a first token against the pace of the rest, for the slowest one in a hundred requests. The "
    "larger a point, the longer its slowest requests take in all. Dashed lines: the goals.",
    "timeline": "How many requests ran and how many waited, and how full the KV memory was, over time.",
    "strip": "When each request was on the device. Each row is a request, the first to arrive at the top. A bar: it "
    "was on the device. A thin grey line: it was alive, but not on the device. The dot: its first token.",
}

CSS = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.where { color: #555; margin-top: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #555; padding-bottom: .4rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child { text-align: left; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; } figcaption { color: #444; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.2rem; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page that is not about the runs: a heading, plain text, and a picture (``plots.to_svg``)."""

    title: str
    paragraphs: Sequence[str]
    name: str
    svg: str
    caption: str


def render_report(
    title: str,
    runs: Sequence[Run],
    machine: Mapping[str, Any],
    paragraphs: Sequence[str] = (),
    ways: Mapping[str, str] | None = None,
    sections: Sequence[Section] = (),
    figures: Mapping[str, Figure] | None = None,
) -> str:
    """The page as HTML that refers to nothing outside itself.

    ``paragraphs`` introduce it, ``ways`` describe the runs by name, ``sections`` follow their pictures, all in plain
    text. ``figures`` are the runs' pictures by the names of ``CAPTIONS``; None: all that they have data for.
    """
    if figures is None:
        figures = draw_all(runs)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="where">{escape(subtitle(runs))}</p>',
        *(f"<p>{escape(text)}</p>" for text in paragraphs),
        *(["<h2>The ways</h2>", _facts(ways)] if ways else []),
        "<h2>What happened</h2>",
        "<ul>",
        *(f"<li>{escape(explain(name, result))}</li>" for name, result in runs),
        "</ul>",
        "<h2>Numbers</h2>",
        _table(runs),
        *(["<h2>Pictures</h2>"] if figures else []),
        *(_picture(name, to_svg(figure), CAPTIONS[name]) for name, figure in figures.items()),
        *(_section(section) for section in sections),
        *_emulation(runs),
        "<h2>Machine</h2>",
        _facts(machine),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def explain(name: str, result: Mapping[str, Any]) -> str:
    """Return a summary of one run for readers without background, from the view of users."""
    if not result["completed"]:
        return f"{name}: no request was answered; {result['failed']} failed."

    def seconds(key: str) -> str:
        value = lookup(result, key)
        return format_number(None if value is None else value / 1e3 if key.endswith("_ms") else value)

    sentences = [
        f"{name}: half of the {result['completed']} answered requests showed their first word within "
        f"{seconds('median_ttft_ms')} s; one in ten waited longer than {seconds('p90_ttft_ms')} s, and the unluckiest "
        f"{seconds('max_ttft_ms')} s."
    ]
    if lookup(result, "floodplain.max_token_gap_s") is not None:
        sentences.append(f"The longest pause inside an answer was {seconds('floodplain.max_token_gap_s')} s.")
    waiting = lookup(result, "floodplain.timeline.num_waiting")
    if waiting:
        swapped = lookup(result, "floodplain.timeline.num_swapped") or [0] * len(waiting)
        most = max(sum(pair) for pair in zip(waiting, swapped, strict=True))
        sentences.append(f"At worst {format_number(most)} requests were off the device at the same time.")
    preemptions = lookup(result, "floodplain.preemptions")
    if preemptions:
        sentences.append(f"Running requests were pushed out of memory {format_number(preemptions)} times.")
    if result["failed"]:
        sentences.append(f"{result['failed']} requests failed and are left out of the times.")
    return " ".join(sentences)


def _table(runs: Sequence[Run]) -> str:
    headings, rows = transposed(*summary_rows(runs))
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    ]
    return "\n".join(
        [
            '<div class="scroll" role="region" aria-label="Numbers of each run" tabindex="0">',
            "<table>",
            "<caption>TTFT: wait for the first token. TPOT: mean time of each further token. E2E: whole answer. "
            "p90: nine of ten requests were at or below this. Stalled: nothing could run before a copy ended."
            "</caption>",
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def _section(section: Section) -> str:
    words = "\n".join(f"<p>{escape(text)}</p>" for text in section.paragraphs)
    return f"<h2>{escape(section.title)}</h2>\n{words}\n{_picture(section.name, section.svg, section.caption)}"


def _picture(name: str, svg: str, caption: str) -> str:
    return f"<figure>\n{inline_svg(svg, name, caption)}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG document as an element for a page: without metadata and with ids of its own.

    Ids must be unique in a page, and matplotlib gives every picture the same ones.
    """
    element = svg[svg.index("<svg") :].strip()
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{prefix}-', element)
    element = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)


def explain_emulation(link: Mapping[str, Any]) -> str:
    """Return an explanation of which parts of an emulated link are real. ``link``: its facts in a result."""
    gigabytes = {key: format_number(link[key] / 1e9) for key in ("modelled_bandwidth", "bandwidth")}
    return (
        f"{link['name']}: copies to and from swap space are real and stay inside this machine's memory. Each is held "
        f"back until it has taken as long as on the modelled link, slowed down {format_number(link['slowdown'])} "
        f"times: {gigabytes['modelled_bandwidth']} GB/s of a large copy become {gigabytes['bandwidth']} GB/s. "
        f"Everything else is measured, not modelled. Source of the link's numbers: {link['source']}"
    )


def _emulation(runs: Sequence[Run]) -> list[str]:
    links = [link for _, result in runs for link in lookup(result, "floodplain.hardware.links") or ()]
    texts = dict.fromkeys(explain_emulation(link) for link in links if link["emulated"])
    return ["<h2>What is emulated</h2>", *(f"<p>{escape(text)}</p>" for text in texts)] if texts else []


def _facts(facts: Mapping[str, Any]) -> str:
    entries = (f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return "\n".join(["<dl>", *entries, "</dl>"])
