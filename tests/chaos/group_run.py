"""The second part of ``make chaos``: faults by seed in each state of groups that drop layers and restore them."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from tests.chaos.group_cluster import ENGINE, MODEL, GroupCluster
from tests.chaos.group_faults import STORIES, play
from tests.chaos.group_load import known_requests

ROUNDS = (2, 3)
"""Instances of the front; the stories are dealt to the rounds in turns."""


def run(seed: int, num_faults: int) -> dict[str, Any]:
    """Stories in an order by seed, over one front after the other."""
    stories = Random(seed).sample(STORIES, len(STORIES))
    dealt = [stories[number % len(stories)] for number in range(num_faults)]
    known = known_requests(MODEL, ENGINE, seed)
    seconds, totals = defaultdict[str, list[float]](list), Counter[str]()
    for which, num_instances in enumerate(ROUNDS):
        folder = Path(tempfile.mkdtemp(prefix="chaos-groups-"))
        with closing(GroupCluster(folder, num_instances, known)) as cluster:
            cluster.start()
            for number in range(which, num_faults, len(ROUNDS)):
                begin_s, story = time.monotonic(), dealt[number]
                play(cluster, story, Random(f"{seed} {number}"))
                seconds[story.fault].append(time.monotonic() - begin_s)
                print(f"{number:4} {num_instances} {story!s:48} {seconds[story.fault][-1]:5.1f} s", flush=True)
            totals.update(_count(cluster))
            cluster.finish()
        shutil.rmtree(folder)  # of a run that failed, the log stays
    return {
        "seed": seed,
        "faults": {name: len(some) for name, some in sorted(seconds.items())},
        "states": dict(sorted(Counter(str(story.state) for story in dealt).items())),
        "seconds": {
            name: {"median": round(median(some), 2), "max": round(max(some), 2)}
            for name, some in sorted(seconds.items())
        },
        **totals,
    }


def _count(cluster: GroupCluster) -> dict[str, int]:
    groups = cluster.groups()
    return {
        "requests_checked": cluster.load.num_checked,
        "requests_wrong": len(cluster.load.wrong),
        "requests_hung_up": cluster.load.num_hung_up,
        "requests_carried": groups["carried_requests"],
        "requests_recomputed": groups["recomputed_requests"],
        **{f"groups_{name}": number for name, number in groups["changes"].items()},
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=len(STORIES), help="more begin anew")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "groups.json")
    args = parser.parse_args()
    begin_s = time.monotonic()
    result = run(args.seed, args.faults)
    facts = {"command": " ".join(["python -m tests.chaos.group_run", *sys.argv[1:]])}
    facts |= {"python": platform.python_version(), "minutes": f"{(time.monotonic() - begin_s) / 60:.1f}"}
    args.out.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
