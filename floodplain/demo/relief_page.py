"""The output of ``floodplain demo --cluster``: ``demo.json``, picture, page, and the printed summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.demo.page import describe_machine
from floodplain.demo.relief import describe_drop
from floodplain.files.results import write_result
from floodplain.observe.terminal import say

if TYPE_CHECKING:
    from floodplain.demo.run import Run

TITLE = "Floodplain demo: a spike over two instances that can drop layers"
SECTION = "Layers dropped, and restored"
CAPTION = (
    "Above: KV blocks that there are (black), and those that requests hold. Middle: requests. Below: the wait for the "
    "first token of each request, at the second at which it was sent. Shaded: what the two instances did meanwhile."
)
ROWS: tuple[tuple[str, str, float], ...] = (
    ("TTFT p50 (s)", "median_ttft_ms", 1e-3),
    ("TTFT p99 (s)", "p99_ttft_ms", 1e-3),
    ("TPOT p50 (ms)", "median_tpot_ms", 1.0),
    ("TPOT p99 (ms)", "p99_tpot_ms", 1.0),
    ("tokens/s", "output_throughput", 1.0),
    ("done", "completed", 1.0),
    ("failed", "failed", 1.0),
)
"""(heading, key of a benchmark result, factor from the key's unit to the heading's)."""


def write_cluster_files(folder: Path, runs: Sequence[Run], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Write all files into ``folder``; return the content of ``demo.json``.

    Args:
        folder: Made if it does not exist.
        runs: One for each phase, from ``relief.runs_of``.
        cluster: From ``relief.serve_relief``.
    """
    from floodplain.observe.plots import save_figures, to_svg
    from floodplain.observe.relief import draw_relief
    from floodplain.observe.report import Section, render_report
    from floodplain.observe.strict_json import save_result

    machine = describe_machine()
    summary = {"runs": [{"name": name, **result} for name, result in runs], "cluster": cluster, "machine": machine}
    figure = draw_relief(cluster, f"{runs[0][1]['model_id']} on {machine['processor']}, two instances")
    save_result(folder / "demo.json", summary)
    save_figures({"cluster": figure}, folder)
    section = Section(SECTION, (describe_drop(cluster), describe_price(runs)), "cluster", to_svg(figure), CAPTION)
    page = render_report(TITLE, runs, machine, paragraphs(cluster["scene"]), sections=[section], figures={})
    write_result(folder / "index.html", page)
    return summary


def print_cluster_summary(folder: Path, summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the table of the phases, the drop and its price, and the page's path; or all of ``demo.json``."""
    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_number, format_table

    if as_json:
        say(to_json(summary))
        return
    runs = summary["runs"]
    rows = [
        [heading, *(format_number(None if run[key] is None else run[key] * factor) for run in runs)]
        for heading, key, factor in ROWS
    ]
    say(format_table(["", *(run["name"] for run in runs)], rows))
    say(f"\n{describe_drop(summary['cluster'])}\n{describe_price([(run['name'], run) for run in runs])}")
    say(f"picture and numbers: {folder / 'index.html'}")


def describe_price(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A paragraph with median TPOT and TTFT in each phase."""
    from floodplain.observe.table import format_number

    def medians(result: Mapping[str, Any]) -> str:
        ttft_ms, tpot_ms = result["median_ttft_ms"], result["median_tpot_ms"]
        return f"{format_number(tpot_ms)} ms beside {format_number(None if ttft_ms is None else ttft_ms / 1e3)} s"

    parts = ", ".join(f"{name} {medians(result)}" for name, result in runs)
    return (
        f"The price, median TPOT beside median TTFT: {parts}. In a group more requests share each step, and each token "
        "passes both instances."
    )


def paragraphs(scene: Mapping[str, Any]) -> tuple[str, ...]:
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
