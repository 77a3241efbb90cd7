"""Draws one load of a result of the burst benchmark: KV, TTFT and waiting requests over time, arm by arm.

python -m benchmarks.cluster.burst_chart FILE --load 2x      # writes FILE's name with -2x.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from floodplain.observe.style import BLACK, LINES, MARKERS, colours_of, make_figure, save_figure, styled

PIPELINED = "pipelined"
SHOWN = ("recompute", "paced", "pipeline", "drop", "auto")


def changes_of(timeline: Mapping[str, Sequence[Any]]) -> list[tuple[float, float, str]]:
    """(begin, end, state) of each stretch of time in which a group was in one state."""
    found: list[tuple[float, float, str]] = []
    before: str | None = None
    for when, state in zip(timeline["time_s"], timeline["state"], strict=True):
        if before is not None:
            begin, _, name = found[-1]
            found[-1] = (begin, when, name)
        if state is not None and state != before:
            found.append((when, when, state))
        before = state
    return found


def draw(runs: Sequence[Mapping[str, Any]], hardware: str, rate: float) -> Any:
    """The figure: requests' TTFT by when they were sent, KV blocks in use and in all, requests that wait.

    Below, when an arm's instances were a group; its changes are black. The burst is grey.
    """
    title = f"{runs[0]['load']}: KV memory and first tokens, with layers dropped and restored"
    colours = colours_of(run["arm"] for run in runs)
    key = {
        arm: {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        for index, (arm, colour) in enumerate(colours.items())
    }
    where = f"SmolLM2-135M, two instances, {hardware}; calm: {rate:.2f} requests/s"
    figure, panels = make_figure(title, where, 4, 1.6, key=key)
    ttft, kv, queue, group = panels
    for panel in panels:
        for begin, end in runs[0]["bursts"]:
            panel.axvspan(begin, end, color="#eeeeee", zorder=0)
    for index, run in enumerate(runs):
        colour, times = colours[run["arm"]], run["timeline"]["time_s"]
        marker = MARKERS[index % len(MARKERS)]
        ttft.plot(run["sent_s"], run["ttft_s"], marker, color=colour, markersize=3, label=run["arm"])
        kv.plot(times, run["timeline"]["used_blocks"], color=colour, linewidth=1.3)
        kv.plot(times, run["timeline"]["blocks"], color=colour, linewidth=0.9, linestyle=LINES[3])
        waiting = [sum(pair) for pair in zip(run["timeline"]["waiting"], run["timeline"]["swapped"], strict=True)]
        queue.plot(times, waiting, color=colour, linewidth=1.3, drawstyle="steps-post")
        for begin, end, state in changes_of(run["timeline"]):
            shade = colour if state == PIPELINED else BLACK
            group.barh(-index, end - begin, left=begin, height=0.6, color=shade)
    ttft.set_yscale("log")
    ttft.set_ylabel("TTFT (s)")
    kv.set_ylabel("KV blocks\n(dotted: of so many)")
    queue.set_ylabel("waiting or\nswapped out")
    group.set_yticks([-index for index in range(len(runs))], [run["arm"] for run in runs], fontsize=8)
    group.set_ylim(0.5 - len(runs), 0.5)
    group.set_xlabel("seconds since the load began")
    return figure


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--load", default="2x")
    parser.add_argument("--arms", nargs="+", default=SHOWN)
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    found = [run for run in result["runs"] if run["load"] == args.load and run["round"] == 1]
    runs = sorted((run for run in found if run["arm"] in args.arms), key=lambda run: args.arms.index(run["arm"]))
    if not runs:
        raise SystemExit(f"{args.file} has no run of {args.load} with these arms: name others")
    with styled():
        figure = draw(runs, result["hardware"], result["rate"])
        save_figure(figure, args.file.with_name(f"{args.file.stem}-{args.load}.png"))


if __name__ == "__main__":
    main()
