"""The output of ``floodplain demo``: ``demo.json``, the pictures, the page, and the summary that it prints."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodplain.demo.leases import describe
from floodplain.demo.load import Scale
from floodplain.demo.run import Run
from floodplain.demo.ways import (
    EXPANSION_TITLE,
    TITLE,
    WAYS,
    expansion_paragraphs,
    expansion_ways,
    paragraphs,
)
from floodplain.files.results import write_result
from floodplain.observe.terminal import say

if TYPE_CHECKING:
    from floodplain.observe.report import Section

LEASES_TITLE = "Memory lent between two servers"
LEASES_CAPTION = (
    "Above: the lender's memory; white is on its way from one to the other. Middle: where the borrower keeps what does "
    "not fit on its device. Below: how many tokens it generates."
)


def write_files(
    folder: Path, scale: Scale, runs: list[Run], leases: Mapping[str, Any] | None, *, expands: bool = False
) -> dict[str, Any]:
    """Write all files into ``folder``; return the content of ``demo.json``.

    Args:
        folder: Made if it does not exist.
        scale: Of the first part.
        runs: Of the first part.
        leases: Results of the second part; None if it did not run.
        expands: Whether the runs are those of ``--expansion``.
    """
    from floodplain.observe.plots import draw_all, save_figures
    from floodplain.observe.report import render_report
    from floodplain.observe.strict_json import save_result

    machine = describe_machine()
    summary = {"runs": [{"name": name, **result} for name, result in runs], "leases": leases, "machine": machine}
    save_result(folder / "demo.json", summary)
    figures = draw_all(runs)
    save_figures(figures, folder)
    lengths = (scale.burst_s, scale.burst_factor)
    if expands:
        title, ways = EXPANSION_TITLE, expansion_ways(scale.pool_part)
        words = expansion_paragraphs(scale.num_resident, scale.pool_part, *lengths)
    else:
        title, ways, words = TITLE, WAYS, paragraphs(scale.num_resident, *lengths)
    page = render_report(
        title,
        runs,
        machine,
        words,
        {way.name: way.words for way in ways},
        [_leases_section(folder, leases, f"{runs[0][1]['model_id']} on {machine['processor']}")] if leases else [],
        figures,
    )
    write_result(folder / "index.html", page)
    return summary


def print_summary(folder: Path, summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a table of the runs, lines on expansion and leases, and the page's path; or all of ``demo.json``."""
    from floodplain.observe.strict_json import to_json
    from floodplain.observe.table import format_number, format_table, summary_rows, transposed

    if as_json:
        say(to_json(summary))
        return
    say(format_table(*transposed(*summary_rows([(run["name"], run) for run in summary["runs"]]))))
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
    say(f"pictures and numbers: {folder / 'index.html'}")


def _leases_section(folder: Path, leases: Mapping[str, Any], where: str) -> Section:
    from floodplain.observe.lending import draw_lending
    from floodplain.observe.plots import save_figures, to_svg
    from floodplain.observe.report import Section

    figure = draw_lending(leases, f"{where}, two servers")
    save_figures({"leases": figure}, folder)
    return Section(LEASES_TITLE, describe(leases), "leases", to_svg(figure), LEASES_CAPTION)


def describe_machine() -> dict[str, Any]:
    """Facts of this machine, for ``machine`` of ``demo.json`` and the page."""
    import torch

    from floodplain.bench.offline import hardware_report

    return {
        "processor": hardware_report("cpu").name,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
