"""What lending costs the lender, how soon its memory is back, and what leases cost the step loop. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.elasticity.arms import NUM_RESIDENT, SCALE, Servers, running
from benchmarks.elasticity.boundary import measure_boundary
from benchmarks.elasticity.pairs import compare, find_goals, format_table, measure_pair
from benchmarks.elasticity.recalls import measure_recalls
from floodplain.bench.offline import hardware_report
from floodplain.demo.burst import FULL, engine_config, sample_spec
from floodplain.demo.leases import short_texts, texts
from floodplain.engine.config import EngineConfig
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result
from floodplain.workload.spec import WorkloadSpec, build

HERE = Path(__file__).resolve().parent
RECALL_SCALE = replace(SCALE, lend_after_s=1.5)
"""Longer than a recall takes, so that each is over before memory is lent again."""
PARTS = ("boundary", "pairs", "recalls")


class Bench:
    """The parts, each with servers of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._sample: WorkloadSpec = sample_spec(args.seed, FULL)
        base = engine_config(args.model, self._sample, FULL)
        pool_bytes = round((base.kv_memory or 0) * NUM_RESIDENT / FULL.num_resident)
        self._base: EngineConfig = replace(base, kv_memory=pool_bytes)
        self._tokenizer = open_model(args.model).load_tokenizer()

    def boundary(self, folder: Path) -> dict[str, Any]:
        """What leases cost at each boundary: a lender with an idle borrower, a borrower with an idle lender."""
        found = {}
        for role, start in (("lender", Servers.start_borrower), ("borrower", Servers.start_lender)):
            with running(folder, self._base) as servers:
                url = servers.start_coordinator()
                start(servers, url).wait_ready()
                found[role] = measure_boundary(url, self._args.model, role, self._args.seed)
        return found

    def pairs(self, folder: Path) -> dict[str, Any]:
        """What the requests of lender and borrower saw in both arms, pair by pair."""
        with running(folder, self._base) as servers:
            arms = [servers.start_peer(servers.start_coordinator()), servers.start_host()]
            common = (self._args.model, self._sample, self._tokenizer)
            goals = asyncio.run(find_goals(arms[1], *common, self._args.seed))  # of servers that know of no leases
            pairs = []
            for number in range(self._args.pairs + 1):  # the first one warms up
                pairs.append(asyncio.run(measure_pair(arms, *common, self._args.seed + number, goals)))
                tpots_ms = {arm.name: pairs[-1][arm.name]["mean_tpot_ms"] for arm in arms}
                print(f"pair {number}: the lender's mean TPOT in ms: {tpots_ms}", flush=True)
        print(f"seeds {', '.join(str(pair['seed']) for pair in pairs[1:])}\n{format_table(pairs[1:])}")
        return {"pairs": pairs[1:], **compare(pairs[1:])}

    def recalls(self, folder: Path) -> dict[str, Any]:
        """Recalls from a busy borrower."""
        with running(folder, self._base) as servers:
            arm = servers.start_peer(servers.start_coordinator(), RECALL_SCALE, "auto")
            loads = (build(spec(self._sample, 1), self._tokenizer) for spec in (short_texts, texts))
            return asyncio.run(measure_recalls(arm, self._args.model, *loads, num_rounds=self._args.recalls))


def main() -> None:
    """Measure the parts that the flags name, and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=8, help="at least 5")
    parser.add_argument("--recalls", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for PART.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)  # before anything is measured that could not be written
    bench = Bench(args)
    for part in args.parts:
        measure: Callable[[Path], dict[str, Any]] = getattr(bench, part)
        with tempfile.TemporaryDirectory(prefix="floodplain-elasticity-") as folder:
            facts = _facts()
            print(f"{part}: {facts['command']}", flush=True)
            result = facts | measure(Path(folder))
        save_result(args.out / f"{part}.json", result)


def _facts() -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks.elasticity.run", *sys.argv[1:]]),
        "processor": hardware_report("cpu").name,
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
