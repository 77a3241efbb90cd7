"""Replicas, a pipeline, and layers that are dropped under a burst: ``python -m benchmarks.cluster.burst --out FILE``.

Each run is a fresh server. A round serves the same requests in every arm, one arm after the other, forwards and
backwards in turn. In fp32 the tokens must be those of one engine; what differs is counted in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.burst_arms import ARMS, BLOCK_TOKENS, command_of, reference_command
from benchmarks.cluster.burst_loads import LOADS, make_requests, make_steady, streams_of_half
from benchmarks.cluster.burst_run import Bench, run_arm
from benchmarks.cluster.burst_table import format_report
from floodplain.bench.offline import hardware_report
from floodplain.files.results import write_result
from floodplain.model.weights.open_model import open_model
from floodplain.workload.records import LoadRequest

NUM_REFERENCES = 3
PLAN: Mapping[str, Sequence[str]] = {
    "2x": ("recompute", "recompute, plain", "paced", "paced, plain", "pipeline", "drop", "auto"),
    "4x": ("recompute", "paced", "pipeline", "drop"),
    "waves": ("drop", "drop, kept"),
    "waves apart": ("drop", "drop, kept"),
    "endless": ("recompute", "drop"),
    "burstgpt": ("recompute", "migrate", "paced", "drop"),
}
"""Arms of each load, if ``--arms`` names no others. The first one is the baseline."""


def find_calm_rate(bench: Bench, requests: Sequence[LoadRequest], num_streams: int) -> float:
    """Requests a second that the baseline finishes while so many are under way; without its first and last streams."""
    with bench.serving(command_of("recompute", bench.model, bench.blocks)) as url:
        records = asyncio.run(bench.send(url, requests, num_streams))
    ends_s = sorted(record.finished_s for record in records)
    begin_s, end_s = ends_s[num_streams - 1], ends_s[-num_streams]
    return (len(requests) + 1 - 2 * num_streams) / (end_s - begin_s)


def sample_of(requests: Sequence[LoadRequest]) -> list[int]:
    """Numbers of the requests whose tokens are compared with one engine's: the first, the last, and between."""
    return sorted({round(place) for place in np.linspace(0, len(requests) - 1, NUM_REFERENCES)})


def find_references(
    bench: Bench, loads: Mapping[tuple[str, int], Sequence[LoadRequest]]
) -> dict[tuple[str, int], list[Any]]:
    """One engine's tokens of the sampled requests, by load and round."""
    with bench.serving(reference_command(bench.model)) as url:
        return {
            key: [
                record.output_token_ids
                for record in asyncio.run(bench.send(url, [requests[number] for number in sample_of(requests)], 1))
            ]
            for key, requests in loads.items()
        }


def compare(run: dict[str, Any], expected: Sequence[Any], reference: Sequence[Any]) -> None:
    """Replace the tokens of a run by how many requests have those of the round's first arm, and of one engine."""
    tokens = run.pop("tokens")
    sample = [tokens[number] for number in sample_of(tokens)]
    run["equal"] = [sum(map(_is_equal, tokens, expected)), len(tokens)]
    run["equal_engine"] = [sum(map(_is_equal, sample, reference)), len(sample)]


def _is_equal(tokens: Any, others: Any) -> bool:
    return tokens is not None and tokens == others


def measure(args: argparse.Namespace, bench: Bench, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All runs."""
    tokenizer = open_model(args.model).load_tokenizer()
    if args.rate is None:
        num_streams = streams_of_half(args.blocks, BLOCK_TOKENS)
        args.rate = find_calm_rate(bench, make_steady(4 * num_streams, args.seed, tokenizer), num_streams)
        print(f"calm rate: {args.rate:.3f} requests/s, at which {num_streams} are under way", flush=True)
    result["rate"] = args.rate
    loads = {name: LOADS[name].scaled(args.scale) for name in args.loads}
    requests = {
        (load, round_): make_requests(loads[load], args.rate, args.seed + round_, tokenizer, args.traces)
        for load in args.loads
        for round_ in range(1, args.rounds + 1)
    }
    references = find_references(bench, requests)
    for (load, round_), sent in requests.items():
        arms = list(args.arms or PLAN[load])
        expected = None
        for name in arms if round_ % 2 else reversed(arms):
            run = run_arm(bench, name, loads[load], sent)
            expected = run["tokens"] if expected is None else expected
            compare(run, expected, references[load, round_])
            if round_ > 1:
                del run["timeline"]
            yield {"load": load, "round": round_, "seed": args.seed + round_, **run}


def read_args() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["2x"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=None, help="the first one is the baseline")
    parser.add_argument("--blocks", type=int, default=48, help="KV blocks of an instance")
    parser.add_argument("--rate", type=float, default=None, help="the calm rate, requests/s (default: measured)")
    parser.add_argument("--scale", type=float, default=1.0, help="loads last so many times as long (a short look)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, default=None, help="folder with the trace of --loads burstgpt")
    parser.add_argument("--out", type=Path, default=None, help="write all runs to this JSON file, after each of them")
    parser.add_argument("--show", type=Path, nargs="+", default=None, help="measure nothing; show these files")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and keep what was measured."""
    args = read_args()
    if args.show is not None:
        print(format_report([run for path in args.show for run in json.loads(path.read_text())["runs"]]))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of each instance, on two cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result: dict[str, Any] = {"hardware": hardware_report("cpu").name, "settings": settings, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for run in measure(args, Bench(args.model, args.blocks, Path(folder)), result):
            result["runs"].append(run)
            facts = (run["load"], run["round"], run["arm"], run["wall_s"], run["burst_tokens_s"])
            print("{}, round {}, {}: {} s, {:.0f} tokens/s in the burst".format(*facts), flush=True)
            if args.out is not None:
                write_result(args.out, dump(result))
    print(format_report(result["runs"]))


def dump(result: Mapping[str, Any]) -> str:
    """JSON with a line for each run."""
    head = json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1)
    runs = ",\n".join(json.dumps(run) for run in result["runs"])
    return f'{head.removesuffix("}").rstrip()},\n "runs": [\n{runs}\n]}}\n'


if __name__ == "__main__":
    main()
