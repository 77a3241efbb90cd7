"""Derives what steps of Yi-34B cost on one A100, from timings that others published; see README.md.

python benchmarks/swap_space/steps.py --steps splitwise_e2e.csv --prefill aic_attention_prefill.csv --decode aic_attention_decode.csv

With ``--llama h100-80gb 2`` it prints those of Llama-2-70B itself on so many GPUs, as ``floodplain/cost/fits.py`` has them.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from floodplain.cost.fit import StepFit, StepRow, fit_steps, nonnegative_least_squares
from floodplain.cost.step_time import LINE_PARTS, StepCost, StepWork
from floodplain.files.profile import Profile
from floodplain.observe.strict_json import save_result

OUT = Path(__file__).resolve().parent / "yi-34b-a100.json"
MEASURED = ("a100-80gb", 2)
"""Llama-2-70B on two A100: each holds 69 GB of parameters, as one A100 does of Yi-34B."""
MEASURED_LAYERS, MEASURED_HEADS = 80, (64, 8)
YI_LAYERS, YI_QUERY_HEADS = 60, 56
ODD_BATCH = 64
"""Its prompt time is an eighth of that of half the batch: no prefill of all its tokens."""


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def attention_s(path: Path, query_heads: int, kv_heads: int, gpu: str = "a100") -> float:
    """Seconds in one layer of a GPU for each pair of tokens (prefill), or each token of a context (decode)."""
    amounts, times = [], []
    for row in rows_of(path):
        if (row["gpu"], row["q_heads"], row["kv_heads"]) == (gpu, str(query_heads), str(kv_heads)):
            batch = int(row["batch_size"])
            if "prompt_len" in row:
                tokens = int(row["prompt_len"])
                amounts.append([1, batch * tokens, batch * tokens * (tokens + 1) // 2])
            else:
                amounts.append([1, batch, batch * int(row["kv_len"])])
            times.append(float(row["lat_us"]) / 1e6)
    seconds = np.array(times)
    return float(nonnegative_least_squares(np.array(amounts) / seconds[:, None], np.ones(len(seconds)))[2])


def between(low: tuple[int, float], high: tuple[int, float], heads: int) -> float:
    """On the line through two (heads, seconds)."""
    return low[1] + (high[1] - low[1]) * (heads - low[0]) / (high[0] - low[0])


def measured_rows(path: Path, hardware: str, num_gpus: int, pair_s: float, context_token_s: float) -> Iterator[StepRow]:
    """Steps of Llama-2-70B, without their attention."""
    for row in rows_of(path):
        if (row["model"], row["hardware"], row["tensor_parallel"]) != ("llama2-70b", hardware, str(num_gpus)):
            continue
        prompt, batch, output = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
        if output == 128 and batch != ODD_BATCH:  # the others repeat a prompt
            work = StepWork.of([], [(0, prompt)] * batch)
            yield StepRow(work, float(row["prompt_time"]) / 1e3 - pair_s * work.self_pairs)
        work = StepWork.of([prompt + output // 2] * batch, [])
        yield StepRow(work, float(row["token_time"]) / 1e3 - context_token_s * work.context_tokens)


def fit_measured(args: argparse.Namespace, hardware: str, num_gpus: int) -> tuple[StepFit, float, float]:
    """The fit of Llama-2-70B without its attention, and seconds of that for each pair and each context token."""
    heads = (MEASURED_HEADS[0] // num_gpus, MEASURED_HEADS[1] // num_gpus, hardware.partition("-")[0])
    pair_s, context_token_s = (MEASURED_LAYERS * attention_s(path, *heads) for path in (args.prefill, args.decode))
    rows = measured_rows(args.steps, hardware, num_gpus, pair_s, context_token_s)
    return fit_steps(list(rows), LINE_PARTS), pair_s, context_token_s


def with_attention(fit: StepFit, pair_s: float, context_token_s: float) -> dict[str, float]:
    """The parts of a step, with four digits."""
    cost = StepCost(
        **{name: getattr(fit.cost, name) for name in LINE_PARTS},
        context_token_s=context_token_s,
        self_pair_s=pair_s,
        prefix_token_s=context_token_s,
        prefix_pair_s=pair_s,
    )
    return {name: float(f"{seconds:.4g}") for name, seconds in asdict(cost).items()}


def main() -> None:
    """Derive it, and write the profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("steps", "prefill", "decode"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--llama", nargs=2, metavar=("HARDWARE", "GPUS"))
    args = parser.parse_args()
    if args.llama:
        fit, *own_s = fit_measured(args, args.llama[0], int(args.llama[1]))
        parts = with_attention(fit, *own_s)
    else:
        fit, *_ = fit_measured(args, *MEASURED)
        prefill, decode = (
            YI_LAYERS * between(*((heads, attention_s(path, heads, 8)) for heads in known), YI_QUERY_HEADS)
            for path, known in ((args.prefill, (40, 64)), (args.decode, (48, 64)))
        )
        parts = with_attention(fit, prefill, decode)
        save_result(OUT, profile_of(parts, fit).to_json())
    print(parts, f"errors: median {fit.median_error:.1%}, p95 {fit.p95_error:.1%}")


def profile_of(parts: dict[str, float], fit: StepFit) -> Profile:
    """The profile of Yi-34B."""
    return Profile(
        kind="step",
        subject="yi-34b-200k",
        machine="one A100 with 80 GB",
        is_virtual=True,
        settings={"sources": ["splitwise-sim 8f99e7dc, MIT", "aiconfigurator-core 0.12.0, Apache-2.0"]},
        result={name: parts[name] for name in LINE_PARTS} | {"parts": parts},
        errors={"median": fit.median_error, "p95": fit.p95_error},
    )


if __name__ == "__main__":
    main()
