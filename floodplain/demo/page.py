"""The output of ``floodplain demo``: ``demo.json``, the pictures, the page, and the summary that it prints."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from floodplain.bench.offline import hardware_report
from floodplain.demo.alternation import Run
from floodplain.demo.burst import Scale
from floodplain.demo.leases import describe
from floodplain.demo.other_load import verdict
from floodplain.demo.relief import describe_drop
from floodplain.demo.ways import (
    COMPARED,
    EXPANSION_COMPARED,
    EXPANSION_TITLE,
    TITLE,
    WAYS,
    Way,
    expansion_paragraphs,
    expansion_ways,
    paragraphs,
)
from floodplain.files.results import write_result
from floodplain.observe.demo_plots import draw_lending, draw_relief
from floodplain.observe.plots import draw_all, save_figures, to_svg
from floodplain.observe.report import Lead, Section, render_report
from floodplain.observe.strict_json import save_result, to_json
from floodplain.observe.strips import draw_beside_stock
from floodplain.observe.style import small_png
from floodplain.observe.table import format_number, format_table, lookup, summary_table
from floodplain.observe.terminal import say

NUMBERS = (
    ("requests that met both goals", "slo_attainment", 100.0, "%"),
    ("first token, TTFT p99", "p99_ttft_ms", 1e-3, "s"),
    ("whole answer, E2E p50", "median_e2el_ms", 1e-3, "s"),
)
"""(words, key of a benchmark result, factor to the unit, unit)."""


def headline(runs: Sequence[tuple[str, Mapping[str, Any]]], ours: str, other: str) -> dict[str, Any]:
    """``headline`` of ``demo.json``: the numbers of two runs; a number that does not exist is null."""
    results = dict(runs)

    def value(name: str, key: str, factor: float) -> float | None:
        known = lookup(results[name], key)
        return None if known is None else known * factor

    return {
        "ours": ours,
        "other": other,
        "numbers": [
            {"name": words, "unit": unit, "ours": value(ours, key, factor), "other": value(other, key, factor)}
            for words, key, factor, unit in NUMBERS
        ],
    }


def headline_rows(head: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of the numbers, with their units."""
    return ["", head["ours"], head["other"]], [
        [number["name"], *(f"{format_number(number[side])} {number['unit']}" for side in ("ours", "other"))]
        for number in head["numbers"]
    ]


def describe_headline(head: Mapping[str, Any]) -> str:
    """The numbers for a terminal."""
    return format_table(*headline_rows(head))


LEASES_TITLE = "Memory lent between two servers"
LEASES_CAPTION = (
    "Above: the lender's memory; white is moving between the servers. Middle: where the borrower keeps the KV that "
    "does not fit on its device. Below: the tokens that it generates."
)


def write_files(
    folder: Path,
    scale: Scale,
    runs: list[Run],
    leases: Mapping[str, Any] | None,
    other_load: Mapping[str, Any],
    *,
    expands: bool = False,
) -> dict[str, Any]:
    """Write all files into ``folder``, which is made; return the content of ``demo.json``.

    Scale and runs are those of the first part; ``leases`` is None if the second one did not run; ``other_load`` is the
    meter's summary. ``expands``: the runs are those of ``--expansion``.
    """
    machine = describe_machine()
    ours, other = (runs[index] for index in (EXPANSION_COMPARED if expands else COMPARED))
    head = headline(runs, ours[0], other[0])
    summary = {
        "headline": head,
        "other_load": other_load,
        "runs": [{"name": name, **result} for name, result in runs],
        "leases": leases,
        "machine": machine,
    }
    save_result(folder / "demo.json", summary)
    figures = draw_all(runs)
    save_figures(figures, folder)
    if not expands and (beside := draw_beside_stock(other, ours)) is not None:
        write_result(folder / README_PICTURE, small_png(beside))
    title, ways, words = _page_words(scale, expands=expands)
    page = render_report(
        title,
        runs,
        machine,
        words,
        {way.name: way.words for way in ways},
        [_leases_section(folder, leases, f"{runs[0][1]['model_id']} on {machine['processor']}")] if leases else [],
        figures,
        lead=Lead(*headline_rows(head), verdict(other_load)),
    )
    write_result(folder / "index.html", page)
    return summary


README_PICTURE = "readme.png"


def _page_words(scale: Scale, *, expands: bool) -> tuple[str, Sequence[Way], tuple[str, ...]]:
    lengths = (scale.burst_s, scale.burst_factor)
    if expands:
        words = expansion_paragraphs(scale.num_resident, scale.pool_part, *lengths)
        return EXPANSION_TITLE, expansion_ways(scale.pool_part), words
    return TITLE, WAYS, paragraphs(scale.num_resident, *lengths)


def print_summary(folder: Path, summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Print three numbers, a table, lines on expansion, leases and other load, and the page's path; or all as JSON."""
    if as_json:
        say(to_json(summary))
        return
    say(f"{describe_headline(summary['headline'])}\n")
    say(format_table(*summary_table([(run["name"], run) for run in summary["runs"]])))
    for run in summary["runs"]:
        moved = run["floodplain"]["expansion"]
        if moved["in_bytes"]:
            say(
                f"\n{run['name']}: {moved['streamed_layers']} layers stream at the end, {moved['expansion']:.2f} times "
                f"the blocks; compute waited for them for {moved['stall_s']:.2f} s"
            )
    leases = summary["leases"]
    if leases is not None:
        recalls = leases["recalls"]
        say(
            f"\nlent: at most {format_number(leases['most_lent_bytes'] / 2**20)} MiB; taken back: {recalls['num']} "
            f"leases, {format_number(recalls['mean_s'])} s each, {recalls['num_forced']} by force"
        )
    say(verdict(summary["other_load"]))
    say(f"pictures and numbers: {folder / 'index.html'}")


def _leases_section(folder: Path, leases: Mapping[str, Any], where: str) -> Section:
    figure = draw_lending(leases, f"{where}, two servers")
    save_figures({"leases": figure}, folder)
    return Section(LEASES_TITLE, describe(leases), "leases", to_svg(figure), LEASES_CAPTION)


def describe_machine() -> dict[str, Any]:
    """Facts of this machine, for ``machine`` of ``demo.json`` and the page."""
    return {
        "processor": hardware_report("cpu").name,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


RELIEF_TITLE = "Floodplain demo: a spike over two instances that can drop layers"
RELIEF_SECTION = "Layers dropped, and restored"
RELIEF_CAPTION = (
    "Bars at the top: the spike, and the state of the layers. Below them: KV blocks in all, and those that requests "
    "hold; requests; the wait for the first token of each request, at the second at which it was sent."
)
RELIEF_ROWS = ("TTFT p50 (s)", "TTFT p99 (s)", "TPOT p50 (ms)", "TPOT p99 (ms)", "tokens/s", "done", "failed")
"""The rows of ``observe.table.SUMMARY`` that are printed."""


def write_cluster_files(
    folder: Path, runs: Sequence[Run], cluster: Mapping[str, Any], other_load: Mapping[str, Any]
) -> dict[str, Any]:
    """Write all files into ``folder``, which is made; return the content of ``demo.json``.

    There is a run for each phase, from ``runs_of``; ``cluster`` is from ``serve_relief``.
    """
    machine = describe_machine()
    summary = {
        "other_load": other_load,
        "runs": [{"name": name, **result} for name, result in runs],
        "cluster": cluster,
        "machine": machine,
    }
    figure = draw_relief(cluster, f"{runs[0][1]['model_id']} on {machine['processor']}, two instances")
    save_result(folder / "demo.json", summary)
    save_figures({"cluster": figure}, folder)
    section = Section(
        RELIEF_SECTION, (describe_drop(cluster), describe_price(runs)), "cluster", to_svg(figure), RELIEF_CAPTION
    )
    page = render_report(
        RELIEF_TITLE,
        runs,
        machine,
        (*relief_paragraphs(cluster["scene"]), verdict(other_load)),
        sections=[section],
        figures={},
    )
    write_result(folder / "index.html", page)
    return summary


def print_cluster_summary(folder: Path, summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the table of the phases, the drop and its price, and the page's path; or all of ``demo.json``."""
    if as_json:
        say(to_json(summary))
        return
    runs = summary["runs"]
    headings, rows = summary_table([(run["name"], run) for run in runs])
    say(format_table(["", *headings[1:]], [row for row in rows if row[0] in RELIEF_ROWS]))
    say(f"\n{describe_drop(summary['cluster'])}\n{describe_price([(run['name'], run) for run in runs])}")
    say(verdict(summary["other_load"]))
    say(f"picture and numbers: {folder / 'index.html'}")


def describe_price(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A paragraph with median TPOT and TTFT in each phase."""

    def medians(result: Mapping[str, Any]) -> str:
        ttft_ms, tpot_ms = result["median_ttft_ms"], result["median_tpot_ms"]
        return f"{format_number(tpot_ms)} ms beside {format_number(None if ttft_ms is None else ttft_ms / 1e3)} s"

    parts = ", ".join(f"{name} {medians(result)}" for name, result in runs)
    return (
        f"The price, median TPOT beside median TTFT: {parts}. In a group more requests share each step, and each token "
        "passes both instances."
    )


def relief_paragraphs(scene: Mapping[str, Any]) -> tuple[str, ...]:
    """Paragraphs for the page: the setup of the scene."""
    return (
        "One endpoint and two instances of a small language model, each a process of its own that computes with one "
        f"thread. {scene['num_users']} users ask, one request after another. From second {scene['spike_s']:g} to "
        f"{scene['calm_s']:g} there are {scene['num_spike_users']}: their keys and values (KV) need more memory than "
        f"both instances have ({scene['pool_blocks']} blocks of 16 tokens each).",
        "Then each instance drops the layers that the other one keeps, uses their memory for KV, and both serve as one "
        "pipeline. Running requests go on with their KV. When memory has been half empty for 10 seconds, each instance "
        "loads its layers again from the other one.",
        "The instances run with --relief drop, so that the demo shows it on any machine; --relief auto would also ask "
        "the price: it drops layers only if fewer tokens wait, and for less long, than without. With --policy fcfs and "
        "--swap none requests that do not fit wait in line.",
        "before, spike, after: requests by when they were sent. All times are what the client saw, on this machine, in "
        "one run.",
    )
