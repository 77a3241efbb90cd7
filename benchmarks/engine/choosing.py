"""What it costs to choose tokens otherwise than greedily: fields that are not given, JSON schemas, and choices.

    git worktree add ../before 08e1cde && python benchmarks/engine/choosing.py --before ../before

All in one run, in turns, medians of ``--rounds``: tokens a second of 32 greedy streams, of this tree and of an earlier
one (``--before``); of 32 streams under a JSON schema beside free ones; and the seconds until all choices of a prompt of
1,000 tokens have their first token, of 8 choices beside one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL, NUM_STREAMS, NUM_INPUT, NUM_OUTPUT, NUM_LONG = "smollm2", 32, 128, 96, 1000
ROWS = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
SCHEMA = {"type": "array", "items": ROWS, "minItems": 1000}
"""Longer than any answer here, so that no stream ends early."""


def prompts_of(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Random prompts without common prefixes."""
    dice = random.Random(seed)
    return [{"prompt_token_ids": [dice.randrange(100, 40_000) for _ in range(length)]} for _ in range(count)]


def decode_rate(llm: Any, params: Callable[[int], Any], seed: int) -> float:
    """Decoded tokens a second: the time of all tokens, less that of the first ones."""
    seconds = []
    for num_tokens in (1, NUM_OUTPUT + 1):
        begin = time.perf_counter()
        llm.generate(prompts_of(NUM_STREAMS, NUM_INPUT, seed), params(num_tokens), use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return NUM_STREAMS * NUM_OUTPUT / (seconds[1] - seconds[0])


def measure_plain(rounds: int) -> list[float]:
    """Greedy streams, with the names that both trees have."""
    from floodplain import LLM, SamplingParams

    with LLM(MODEL, dtype="bfloat16", kv_memory=2**30, enable_prefix_caching=False) as llm:
        greedy = lambda count: SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)  # noqa: E731
        decode_rate(llm, greedy, 0)
        return [decode_rate(llm, greedy, seed) for seed in range(1, rounds + 1)]


def measure_choosing(rounds: int) -> dict[str, list[float]]:
    """Streams with and without a schema, and choices, in turns."""
    from floodplain import LLM, SamplingParams
    from floodplain.model.structure import structure_of_schema

    structure = structure_of_schema(SCHEMA)
    ways: dict[str, Callable[[int], Any]] = {
        "free": lambda count: SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        "schema": lambda count: SamplingParams(temperature=0.0, max_tokens=count, structure=structure),
    }
    found: dict[str, list[float]] = {name: [] for name in (*ways, "n=1", "n=8")}
    with LLM(MODEL, dtype="bfloat16", kv_memory=2**30, enable_prefix_caching=False) as llm:
        for seed in range(rounds + 1):
            for name, params in ways.items():
                rate = decode_rate(llm, params, 1000 + seed)
                found[name] += [rate] if seed else []
    with LLM(MODEL, dtype="bfloat16", kv_memory=2**30, max_model_len=2048) as llm:
        for seed in range(rounds + 1):
            for number in (1, 8):
                begin = time.perf_counter()
                choices = SamplingParams(temperature=1.0, seed=1, max_tokens=1, n=number)
                llm.generate(prompts_of(1, NUM_LONG, 10_000 + 10 * seed + number), choices, use_tqdm=False)
                found[f"n={number}"] += [time.perf_counter() - begin] if seed else []
    return found


def plain_of(tree: Path, rounds: int) -> list[float]:
    """Measure the greedy streams of a tree in a process of its own."""
    program = f"import sys, json; sys.path[:0] = [{str(tree)!r}, {str(ROOT / 'benchmarks' / 'engine')!r}]; "
    program += f"import choosing; print(json.dumps(choosing.measure_plain({rounds})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=400)
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Measure, print, and write the medians with their ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of 08e1cde")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("choosing.json"))
    args = parser.parse_args()
    plain: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(2):
        plain["before"] += plain_of(args.before, args.rounds)
        plain["now"] += plain_of(ROOT, args.rounds)
    found = {f"greedy, {name}": values for name, values in plain.items()} | measure_choosing(args.rounds)
    rows = {name: [round(one(values), 3) for one in (statistics.median, min, max)] for name, values in found.items()}
    middle = {name: row[0] for name, row in rows.items()}
    ratios = {
        "now / before": round(middle["greedy, now"] / middle["greedy, before"], 3),
        "schema / free": round(middle["schema"] / middle["free"], 3),
        "n=8 / n=1": round(middle["n=8"] / middle["n=1"], 3),
    }
    for name, row in rows.items():
        print(f"{name}: {row[0]} ({row[1]} - {row[2]})")
    print(json.dumps(ratios))
    args.out.write_text(json.dumps({"median, least, most": rows, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
