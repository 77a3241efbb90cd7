"""One prompt whose KV is four times the device's pool: ``python -m benchmarks.expansion.long_prompt``.

In turns: a pool that holds it, two slots with loads ahead, two slots on demand (FlexGen's way); as fast as this machine
copies, and over a modelled link. Tokens must be the same (float32, greedy). Medians of ``--repeats``, whole runs each.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks.expansion.ways import OnDemand
from floodplain.bench.offline import hardware_report
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).resolve().parent
NUM_PROMPT, NUM_OUTPUT = 2000, 48
POOL_BYTES = 22 * 2**20
"""Of device memory: 30 layers of float32 take 90 MiB for that prompt."""
LINK_BYTES_S = 0.5e9
WAYS = ("resident", "ahead", "on demand", "ahead, slow link", "on demand, slow link")


def run_once(way: str) -> tuple[float, tuple[int, ...], dict[str, Any]]:
    """Seconds from submission to the last token, the tokens, and what streamed."""
    config: dict[str, Any] = {
        "model": "smollm2", "dtype": "float32", "policy": "fcfs", "swap": "none", "max_num_seqs": 16,
        "max_batched_tokens": 512, "max_model_len": NUM_PROMPT + 64,
    }  # fmt: skip
    if way == "resident":
        config |= {"kv_memory": 120 * 2**20}
    else:
        config |= {"kv_memory": POOL_BYTES, "kv_expansion": "15", "long_prompts": True}
    engine = build_engine(EngineConfig(**config))
    try:
        if engine.expansion is not None:
            slots: Any = engine.expansion.slots
            slots.line.pace(LINK_BYTES_S if "slow" in way else 0.0)
            if "demand" in way:
                slots.__class__ = OnDemand
        rng = Random(0)
        prompt = tuple(rng.randrange(100, 40_000) for _ in range(NUM_PROMPT))
        params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
        tokens: list[int] = []
        begin_s = time.monotonic()
        engine.add(Request(request_id="long", prompt_token_ids=prompt, params=params, arrival_s=begin_s))
        while engine.has_unfinished:
            for _, delta in engine.step():
                tokens += delta.token_ids
        duration_s = time.monotonic() - begin_s
        facts = engine.stats().expansion
        return duration_s, tuple(tokens), {"expansion": facts.expansion, "stall_s": facts.stall_s}
    finally:
        engine.close()


def main() -> None:
    """Run all ways in turns; print a table, write ``long_prompt.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "long_prompt.json")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    runs = [{"way": way, **_as_row(run_once(way))} for _ in range(args.repeats) for way in WAYS]
    digests = {run.pop("tokens") for run in runs}
    if len(digests) > 1:
        raise SystemExit("the ways gave different tokens")
    about = {"hardware": hardware_report("cpu").name, "threads": torch.get_num_threads(), "link_bytes_s": LINK_BYTES_S}
    save_result(args.out, about | {"runs": runs})
    resident_s = median(run["duration_s"] for run in runs if run["way"] == "resident")
    print("| way | seconds | of resident | stall |\n|---|---|---|---|")
    for way in WAYS:
        ours = [run for run in runs if run["way"] == way]
        duration_s = median(run["duration_s"] for run in ours)
        stall = 100 * median(run["stall_s"] / run["duration_s"] for run in ours)
        print(f"| {way} | {duration_s:.2f} | {duration_s / resident_s:.2f}x | {stall:.1f} % |")


def _as_row(run: tuple[float, tuple[int, ...], dict[str, Any]]) -> dict[str, Any]:
    duration_s, tokens, facts = run
    return {"duration_s": duration_s, "tokens": tokens, **facts}


if __name__ == "__main__":
    main()
