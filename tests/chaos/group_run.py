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
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from tests.chaos.group_cluster import ENGINE, MODEL, GroupCluster
from tests.chaos.group_faults import MERGES, STORIES, play
from tests.chaos.group_load import known_requests
from tests.chaos.group_scene import Story

PARTS = {"groups": (STORIES, (2, 3)), "merges": (MERGES, (3, 4))}
"""Stories, and the numbers of instances of the routers over which they are distributed in turn."""


def deal(part: str, seed: int, num_faults: int | None) -> list[tuple[int, list[tuple[int, Story]]]]:
    """Return the number of instances and the numbered stories, in an order by seed, for each router of a part.

    ``num_faults`` stories, repeated after the last; None: each once.
    """
    found, routers = PARTS[part]
    stories = Random(seed).sample(found, len(found))
    dealt = [(number, stories[number % len(stories)]) for number in range(num_faults or len(stories))]
    return [(num_instances, dealt[which :: len(routers)]) for which, num_instances in enumerate(routers)]


def run(seed: int, num_faults: int | None, parts: Sequence[str]) -> dict[str, Any]:
    """Play the stories of these parts, over one router after the other."""
    routers = [router for part in parts for router in deal(part, seed, num_faults)]
    known = known_requests(MODEL, ENGINE, seed)
    seconds, totals = defaultdict[str, list[float]](list), Counter[str]()
    for num_instances, dealt in routers:
        folder = Path(tempfile.mkdtemp(prefix="chaos-groups-"))
        with closing(GroupCluster(folder, num_instances, known)) as cluster:
            cluster.start()
            for number, story in dealt:
                begin_s = time.monotonic()
                play(cluster, story, Random(f"{seed} {number}"))
                seconds[story.fault].append(time.monotonic() - begin_s)
                print(f"{number:4} {num_instances} {story!s:48} {seconds[story.fault][-1]:5.1f} s", flush=True)
            totals.update(_count(cluster))
            cluster.finish()
        shutil.rmtree(folder)  # the log of a failed run is kept
    played = [story for _, dealt in routers for _, story in dealt]
    return {
        "seed": seed,
        "merges": sum(story.is_merge for story in played),
        "faults": {name: len(some) for name, some in sorted(seconds.items())},
        "states": dict(sorted(Counter(str(story.state) for story in played).items())),
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
    parser.add_argument("--faults", type=int, help="of each part (default: each once); more begin anew")
    parser.add_argument("--only", choices=PARTS, help="this part (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "groups.json")
    args = parser.parse_args()
    begin_s = time.monotonic()
    result = run(args.seed, args.faults, [args.only] if args.only else [*PARTS])
    facts = {"command": " ".join(["python -m tests.chaos.group_run", *sys.argv[1:]])}
    facts |= {"python": platform.python_version(), "minutes": f"{(time.monotonic() - begin_s) / 60:.1f}"}
    args.out.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
