"""``make chaos``: many faults by seed over a running load; writes the results, or fails at the first broken law."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.faults import FAULTS


def run(seed: int, num_faults: int) -> dict[str, Any]:
    """Run rounds of all faults, each in another order, over one cluster."""
    random, seconds = Random(seed), defaultdict[str, list[float]](list)
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, closing(Cluster(Path(folder), seed)) as cluster:
        cluster.wait_for_calm()
        while done.total() < num_faults:
            for fault in random.sample(FAULTS, len(FAULTS)):
                begin_s = time.monotonic()
                fault(cluster, random)
                cluster.wait_for_calm()
                seconds[fault.__name__].append(time.monotonic() - begin_s)
                done[fault.__name__] += 1
                print(f"{done.total():4} {fault.__name__:40} {seconds[fault.__name__][-1]:5.1f} s", flush=True)
        cluster.finish()
        return {
            "seed": seed,
            "faults": dict(sorted(done.items())),
            "seconds_until_calm": {
                name: {"median": round(median(some), 2), "max": round(max(some), 2)}
                for name, some in sorted(seconds.items())
            },
            "engines": cluster.totals,
            "network": dict(cluster.proxy.seen),
        }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=108, help="at least so many; rounds are whole")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    result = run(args.seed, args.faults)
    facts = {"command": " ".join(["python -m tests.chaos.run", *sys.argv[1:]]), "python": platform.python_version()}
    args.out.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    print(json.dumps(result["engines"], indent=1))


if __name__ == "__main__":
    main()
