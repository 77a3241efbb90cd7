"""A pipeline of two instances beside two replicas: ``python -m benchmarks.cluster.pipeline --out FILE``.

All arms run all the time and take turns: a round sends one burst to each of them, so that all meet the same machine,
seconds apart. In fp32 their tokens must be equal, request by request; a difference ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from floodplain.bench.offline import hardware_report
from floodplain.demo.cluster import VerbProcess
from floodplain.model.weights.open_model import open_model
from floodplain.observe.polling import Scraped
from floodplain.observe.strict_json import save_result
from floodplain.web.client import ask_now
from floodplain.workload.client import run_load
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.records import LoadRequest, RequestRecord

BLOCK_TOKENS = 16
_STAGES = "stage_seconds_total"
ARMS = {
    "replicas": ["--policy", "fcfs", "--swap", "none"],
    "replicas, paced": [],
    "pipeline": ["--pipeline"],
    "pipeline, halving": ["--pipeline", "--microbatches", "halving"],
    "pipeline, tokens": ["--pipeline", "--microbatches", "tokens"],
}
"""Flags of ``serve`` by arm. Replicas preempt by recomputing, as vLLM does, or by swapping to the host."""


@dataclass(frozen=True, slots=True)
class Load:
    """A burst: all requests at once; fewest and most tokens of a prompt, and of an answer."""

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]

    def make(self, vocab_size: int, seed: int) -> list[LoadRequest]:
        """The requests of one round: the same for the same seed."""
        dice = Random(seed)
        return [
            LoadRequest(
                request_id=f"{seed}-{number}",
                arrival_s=0.0,
                prompt=None,
                prompt_token_ids=tuple(
                    dice.randrange(100, vocab_size - 100) for _ in range(dice.randint(*self.prompt))
                ),
                max_tokens=dice.randint(*self.output),
                ignore_eos=True,
            )
            for number in range(self.num_requests)
        ]

    @property
    def max_model_len(self) -> int:
        """Tokens of its longest request."""
        return self.prompt[1] + self.output[1]


LOADS = {"short": Load(48, (24, 56), (16, 24)), "long": Load(10, (500, 2000), (4, 8))}


def start_arms(
    stack: ExitStack, folder: Path, model: str, names: Sequence[str], blocks: int, max_model_len: int
) -> dict[str, str]:
    """The address of each arm. Every instance has memory for a whole model and so many blocks.

    A pipeline's stages have the memory of the layers that they lack as KV.
    """
    shape = open_model(model).config.shape
    kv_bytes = blocks * BLOCK_TOKENS * shape.kv_bytes_per_token(4)
    common = ["--dtype", "float32", "--kv-memory", str(kv_bytes), "--max-model-len", str(max_model_len)]
    common += ["--no-enable-prefix-caching", "--block-tokens", str(BLOCK_TOKENS), "--instances", "2", "--port", "0"]
    processes = {
        name: stack.enter_context(VerbProcess(["serve", model, *common, *ARMS[name]], folder / f"{number}.log"))
        for number, name in enumerate(names)
    }
    return {name: str(process.wait_ready()["url"]) for name, process in processes.items()}


def scrape(url: str) -> dict[str, float]:
    """What a router has counted so far."""
    metrics = Scraped(ask_now(url, "/metrics").text, prefix="floodplain_")
    busy = {f"busy {found['stage']}": value for found, value in metrics.samples(_STAGES) if found["state"] == "busy"}
    return {**busy, "stage_s": metrics.sum(_STAGES), "preemptions": metrics.sum("preemptions_total")}


async def send_burst(url: str, model: str, requests: Sequence[LoadRequest]) -> list[RequestRecord]:
    """One burst, as separate clients would send it."""
    return await run_load(HttpTarget(url, model, token_ids=True), requests, progress=False)


def measure(url: str, model: str, requests: Sequence[LoadRequest]) -> tuple[dict[str, Any], list[Any]]:
    """(what a burst came to, the tokens of each request)."""
    before = scrape(url)
    records = asyncio.run(send_burst(url, model, requests))
    for record in records:
        if record.error is not None or record.output_token_ids is None:
            raise RuntimeError(f"a request failed: {record.error or 'its tokens are not known'}")
    counted = {name: value - before.get(name, 0.0) for name, value in scrape(url).items()}
    first_s = [record.token_times_s[0] - record.sent_s for record in records]
    ends_s = [record.token_times_s[-1] - record.sent_s for record in records]
    num_tokens = sum(len(record.token_times_s) for record in records)
    busy_s = [value for name, value in sorted(counted.items()) if name.startswith("busy")]
    stage_s = counted["stage_s"]
    row = {
        "tokens_s": num_tokens / max(ends_s),
        "ttft_p50_s": float(np.percentile(first_s, 50)),
        "ttft_p90_s": float(np.percentile(first_s, 90)),
        "ttft_max_s": max(first_s),
        "e2e_p50_s": float(np.percentile(ends_s, 50)),
        "e2e_max_s": max(ends_s),
        "preemptions": counted["preemptions"],
        "busy": [one * len(busy_s) / stage_s for one in busy_s],
        "bubble": 1 - sum(busy_s) / stage_s if stage_s else None,
    }
    return row, [record.output_token_ids for record in records]


def run_memory(args: argparse.Namespace, blocks: int) -> Iterator[dict[str, Any]]:
    """All rounds of one size of memory."""
    load = LOADS[args.load]
    load = Load(args.requests or load.num_requests, load.prompt, load.output)
    vocab_size = open_model(args.model).config.shape.vocab_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = start_arms(stack, folder, args.model, args.arms, blocks, load.max_model_len)
        for url in urls.values():  # first steps compile, and map memory
            measure(url, args.model, load.make(vocab_size, seed=0))
        for round_ in range(1, args.rounds + 1):
            requests, expected = load.make(vocab_size, seed=args.seed + round_), None
            for name in args.arms if round_ % 2 else reversed(args.arms):
                row, tokens = measure(urls[name], args.model, requests)
                if expected is not None and tokens != expected:
                    raise RuntimeError(f"round {round_}: the tokens of {name} are not those of the arm before it")
                expected = tokens
                yield {"blocks": blocks, "round": round_, "arm": name, **row}


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds; tokens/s also as the median of the ratios to the first arm of the same round."""
    lines = []
    for blocks in dict.fromkeys(row["blocks"] for row in rows):
        ours = [row for row in rows if row["blocks"] == blocks]
        arms = list(dict.fromkeys(row["arm"] for row in sorted(ours, key=lambda row: row["round"])))
        base = {row["round"]: row["tokens_s"] for row in ours if row["arm"] == arms[0]}
        lines += [
            f"\n**{blocks} blocks an instance**\n",
            f"| arm | of {arms[0]} | tokens/s | TTFT p50 | p90 | max | E2E p50 | max (s) | preempted | idle | busy |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for arm in arms:
            mine = [row for row in ours if row["arm"] == arm]
            ratio = median(row["tokens_s"] / base[row["round"]] for row in mine)
            cells = [f"{median(row['tokens_s'] for row in mine):.0f}"]
            cells += [
                f"{median(row[key] for row in mine):.2f}"
                for key in ("ttft_p50_s", "ttft_p90_s", "ttft_max_s", "e2e_p50_s", "e2e_max_s")
            ]
            bubbles = [row["bubble"] for row in mine if row["bubble"] is not None]
            cells += [f"{median(row['preemptions'] for row in mine):.0f}", f"{median(bubbles):.1%}" if bubbles else "-"]
            stages = [median(stage) for stage in zip(*(row["busy"] for row in mine), strict=True)]
            cells.append(", ".join(f"{stage:.0%}" for stage in stages) or "-")
            lines.append(f"| {arm} | {ratio:.2f}x | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_args() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--load", choices=LOADS, default="short")
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 48], help="KV blocks of an instance")
    parser.add_argument("--requests", type=int, default=None, help="of a burst (default: the load's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write all rounds to this JSON file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and keep what was measured."""
    args = read_args()
    rows = [row for blocks in args.blocks for row in run_memory(args, blocks)]
    print(format_table(rows))
    if args.out is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        result = {"hardware": hardware_report("cpu").name, "settings": settings, "rows": rows}
        save_result(args.out, result)


if __name__ == "__main__":
    main()
