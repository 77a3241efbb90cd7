"""One self-contained web page about a few runs: a summary, a table, pictures, the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from floodplain.observe.plots import draw_all, off_device, to_svg
from floodplain.observe.style import Run, subtitle
from floodplain.observe.table import format_number, lookup, summary_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page that is not about the runs: a heading, plain text, and a picture (``plots.to_svg``)."""

    title: str
    paragraphs: Sequence[str]
    name: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Lead:
    """The first thing on the page: a small table (headings, rows) in large figures, and a sentence below."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: str


def render_report(
    title: str,
    runs: Sequence[Run],
    machine: Mapping[str, Any],
    paragraphs: Sequence[str] = (),
    ways: Mapping[str, str] | None = None,
    sections: Sequence[Section] = (),
    figures: Mapping[str, Figure] | None = None,
    *,
    lead: Lead | None = None,
) -> str:
    """The page as HTML that refers to nothing outside itself.

    ``paragraphs`` introduce it, ``ways`` describe the runs by name, ``sections`` follow their pictures, all in plain
    text; ``lead`` stands before all. ``figures``: the runs' pictures, as of ``plots.draw_all``; None: all with data.
    """
    from jinja2 import Environment, PackageLoader

    templates = Environment(loader=PackageLoader("floodplain.observe"), autoescape=True, keep_trailing_newline=True)
    headings, rows = summary_table(runs)
    links = [link for _, result in runs for link in lookup(result, "floodplain.hardware.links") or ()]
    return templates.get_template("report.html").render(
        title=title,
        where=subtitle(runs),
        lead=lead,
        paragraphs=paragraphs,
        ways=ways,
        explanations=[explain(name, result) for name, result in runs],
        headings=headings,
        rows=rows,
        pictures={name: to_svg(each) for name, each in (draw_all(runs) if figures is None else figures).items()},
        sections=sections,
        emulated=list(dict.fromkeys(explain_emulation(link) for link in links if link["emulated"])),
        machine=machine,
        inline_svg=inline_svg,
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
    off = off_device(lookup(result, "floodplain.timeline") or {})
    if off:
        sentences.append(f"At worst {format_number(max(off))} requests were off the device at the same time.")
    preemptions = lookup(result, "floodplain.preemptions")
    if preemptions:
        sentences.append(f"Running requests were pushed out of memory {format_number(preemptions)} times.")
    if result["failed"]:
        sentences.append(f"{result['failed']} requests failed and are left out of the times.")
    return " ".join(sentences)


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG as an element of a page, without metadata and with its own ids: matplotlib's are all the same."""
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
