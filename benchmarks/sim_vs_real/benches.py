"""Holds ``floodplain simulate`` to committed benchmarks of this repository's engine: the gain of each way.

    python -m benchmarks.sim_vs_real.benches --out benchmarks/sim_vs_real/benches.json

The benchmarks did not record what a step costs. So a line (base, decode, prompt token) is fitted to their *baseline*
ways alone, and scaled until the baseline of a comparison takes as long as it did. Every other way is predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.cluster.burst_loads import LOADS, PROMPT, own_rows
from benchmarks.elasticity.arms import MOST_LENT, NUM_RESIDENT, SCALE
from benchmarks.elasticity.pairs import NUM_LENDER_USERS
from floodplain.cost.model_shape import shape_named
from floodplain.demo.burst import FULL, engine_config, sample_spec
from floodplain.demo.leases import LENDER_POOL_BYTES, short_texts, texts
from floodplain.files.profile import Profile
from floodplain.observe.strict_json import save_result
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import make_scenario
from floodplain.workload.spec import WorkloadSpec, build_rows
from floodplain.workload.traces import TraceRow

BENCHMARKS = Path(__file__).parents[1]
SHAPE, DEVICE = "smollm2-135m", "rtx4090"  # the device only names a memory: pools are given
FP32 = 2.0
"""Bytes of the cluster's fp32 over those of the simulator's bf16."""
LENGTHS = {"sharegpt": (0.6, 320, 256), "alpaca": (0.3, 320, 256)}
"""As benchmarks/expansion/run.py has them."""
PREFILL_TOKEN_S = 0.001
"""Of this model in bf16 with one thread: twice that with two (benchmarks/policies). A fit mixes it up with decodes."""
NUM_FITS = 4
MEASURES = ("tokens_s", "ttft_99_s", "e2e_99_s", "tpot_s")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step: of any, of each decode, of each prompt token."""

    base_s: float
    decode_s: float
    prefill_token_s: float

    def times(self, factor: float) -> Line:
        """The line of a machine that takes ``factor`` times as long."""
        return Line(*(factor * value for value in asdict(self).values()))


def simulate(line: Line, content: Row, rows: Sequence[TraceRow] | None = None) -> Row:
    """Return the measures of one run."""
    with TemporaryDirectory() as folder:
        profile = Profile(kind="step", subject=SHAPE, machine="fit", settings={}, result=asdict(line))
        save_result(Path(folder, "steps.json"), profile.to_json())
        common = {"model": SHAPE, "device": DEVICE, "cost": {"steps": "steps.json"}}
        lenders = {name: common | lender for name, lender in content.get("lenders", {}).items()}
        result = predict(make_scenario(common | content | {"lenders": lenders}, "bench", Path(folder)), rows).result
    lent = result["floodplain"]["simulation"].get("lenders", {})
    return {
        **{f"{name}_tpot_50_s": users["median_tpot_ms"] / 1e3 for name, users in lent.items()},
        "tokens_s": result["output_throughput"],
        "ttft_99_s": result["p99_ttft_ms"] / 1e3,
        "e2e_99_s": result["p99_e2el_ms"] / 1e3,
        "tpot_50_s": result["median_tpot_ms"] / 1e3,
    }


def scaled(line: Line, tokens_s: float, content: Row, rows: Sequence[TraceRow] | None = None) -> Line:
    """Return the line with which a baseline generates as many tokens per second as it did."""
    factor = 1.0
    for _ in range(NUM_FITS):
        factor *= simulate(line.times(factor), content, rows)["tokens_s"] / tokens_s
    return line.times(factor)


# -- expansion ---------------------------------------------------------------------------------------------------------


def compare_expansion() -> Iterator[Row]:
    """Each way of benchmarks/expansion over ``recompute``; ways of other papers are not simulated."""
    runs = json.loads((BENCHMARKS / "expansion" / "result.json").read_text())["runs"]
    line = _fit_expansion(runs)
    for key in dict.fromkeys(map(_key_of, runs)):
        ours = [run for run in runs if _key_of(run) == key]
        base = next(run for run in ours if run["way"] == "recompute")
        own = scaled(line, base["tokens_s"], _expansion_scenario(base, base))
        known = simulate(own, _expansion_scenario(base, base))
        for run in ours:
            if run is not base and "demand" not in run["way"] and "Pie" not in run["way"]:
                predicted = simulate(own, _expansion_scenario(run, base))
                where = f"{run['lengths']}, {run['kv_memory'] >> 20} MiB, link {run['ratio']:g}, seed {run['seed']}"
                yield _row("expansion", where, run["way"], "recompute", (run, base), (predicted, known))


def _key_of(run: Row) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("lengths", "seed", "kv_memory", "ratio", "requests"))


def _fit_expansion(runs: Sequence[Row]) -> Line:
    """Least squares over the runs in which no layer streams, relative to their durations; prompts are known before."""
    resident = [run for run in runs if run["way"] == "recompute" or run["way"].startswith("pool")]
    work, seconds = [], []
    for run in resident:
        prompts = sum(row.prompt_tokens for row in build_rows(WorkloadSpec(**_expansion_load(run))))
        prefill_s = PREFILL_TOKEN_S * (prompts + run["recomputed_tokens"])
        work.append((run["steps"], run["tokens"] - run["requests"]))
        seconds.append((run["duration_s"] - prefill_s, run["duration_s"]))
    weights = 1 / np.array(seconds)[:, 1]
    rest_s = np.array(seconds)[:, 0] * weights
    (base_s, decode_s), *_ = np.linalg.lstsq(np.array(work) * weights[:, None], rest_s, rcond=None)
    return Line(float(base_s), float(decode_s), PREFILL_TOKEN_S)


def _expansion_load(run: Row) -> Row:
    scale, max_input, max_output = LENGTHS[run["lengths"]]
    return {
        "request_rate": 6.0, "num_prompts": run["requests"], "length_scale": scale, "max_input": max_input,
        "max_output": max_output, "seed": run["seed"], "goodput": ("ttft:1000",),
    }  # fmt: skip


def _expansion_scenario(run: Row, base: Row) -> Row:
    way, load = run["way"], _expansion_load(run)
    blocks = run["num_blocks"] if way.startswith("pool") else base["num_blocks"]
    engine = {
        "policy": "fcfs", "scheduling": "sync", "kv_blocks": blocks, "max_model_len": 576, "max_num_seqs": 64,
    }  # fmt: skip
    content: Row = {"engine": engine, "workload": load}
    if way == "auto" or (way.endswith("x") and not way.startswith("pool")):
        link = (run["ratio"] or 1.0) * run["memory_bytes_s"]
        content["expansion"] = {"factor": "auto" if way == "auto" else float(way[:-1]), "link": link}
    return content


# -- cluster -----------------------------------------------------------------------------------------------------------

COMPARED = (
    ("burst_2x.json", "2x", "recompute, plain", ("drop",)),
    ("burst_2x.json", "2x", "recompute", ("paced",)),
    ("burst.json", "4x", "recompute", ("paced", "pipeline", "drop")),
    ("burst_long.json", "endless", "recompute", ("drop",)),
)
"""File, load, baseline, and ways over it, in benchmarks/cluster."""
RELIEF = {"mode": "drop", "calm": 4.0, "link": 1e9 / FP32, "remap_s_per_gb": 0.25 * FP32}
"""The rule's times are the benchmark's; link and remapping what the router assumes (fp32: twice the bytes of bf16)."""


def compare_cluster() -> Iterator[Row]:
    """Bursts over two instances: drops, pipelines and turns over replicas that compute again."""
    plain: Line | None = None
    for file, load, baseline, ways in COMPARED:
        content = json.loads((BENCHMARKS / "cluster" / file).read_text())
        runs = {run["arm"]: run for run in content["runs"] if run["load"] == load}
        base = runs[baseline]
        rows = own_rows(LOADS[load].phases, content["rate"], base["seed"])
        assert sum(row.output_tokens for row in rows) == base["output_tokens"]
        measured = {arm: _measures_of(run) for arm, run in runs.items()}
        line = _fit_burst(base, float(np.median(base["tpot_s"])), rows)
        known = simulate(line, _burst_scenario(baseline), rows)
        plain = line if "plain" in baseline else plain
        for way in ways:
            own = plain if way == "drop" and plain is not None else line  # its matrices are not packed
            predicted = simulate(own, _burst_scenario(way), rows)
            yield _row("cluster", load, way, baseline, (measured[way], measured[baseline]), (predicted, known))


def _fit_burst(base: Row, tpot_50_s: float, rows: Sequence[TraceRow]) -> Line:
    """Base and prompt token from requests without load; the decode from the median TPOT under the load."""
    tpot_s, ttft_s = base["before"]["tpot_s"], base["before"]["ttft_s"]
    low, high = 0.0, tpot_s
    for _ in range(2 * NUM_FITS):
        decode_s = (low + high) / 2
        line = Line(tpot_s - decode_s, decode_s, max(0.0, ttft_s - tpot_s + decode_s) / float(np.mean(PROMPT)))
        is_fast = simulate(line, _burst_scenario(base["arm"]), rows)["tpot_50_s"] < tpot_50_s
        low, high = (decode_s, high) if is_fast else (low, decode_s)
    return line


def _measures_of(run: Row) -> Row:
    return {
        "tokens_s": run["output_tokens"] / run["duration_s"],
        "ttft_99_s": float(np.quantile(run["ttft_s"], 0.99)),
        "e2e_99_s": float(np.quantile(run["e2e_s"], 0.99)),
    }


def _burst_scenario(arm: str) -> Row:
    policy = "paced" if "paced" in arm else "fcfs"
    engine = {
        "policy": policy, "scheduling": "sync", "kv_blocks": 48, "max_model_len": 256, "prefix_cache": False,
    }  # fmt: skip
    content: Row = {"engine": engine, "instances": 2, "workload": {"goodput": ["ttft:1000"]}}
    if policy == "paced":
        content["swap"] = {"memory": "1GiB", "link": 1e9}
    if arm in ("drop", "pipeline"):
        content["relief"] = RELIEF | {"mode": arm, "most_stages": 2}
    return content


# -- elasticity --------------------------------------------------------------------------------------------------------

NEIGHBOUR_LINK, HOST_LINK = 2.5e9, 0.35e9
"""Bytes per second, assumed, in the ratio of nvlink4 and pcie5: the bench did not record them."""
FEW = {"policy": "fcfs", "scheduling": "sync", "max_model_len": FULL.max_input + FULL.max_output}
SAMPLE = sample_spec(0, FULL)
BLOCK_BYTES = 16 * shape_named(SHAPE).kv_bytes_per_token()


def compare_elasticity() -> Iterator[Row]:
    """A borrower that swaps to its lender's memory over one that swaps to the host's; users of both wait for answers.

    ``tokens_s`` is the borrower's and ``tpot_s`` the lender's: means over the seeds of all pairs.
    """
    pairs = json.loads((BENCHMARKS / "elasticity" / "pairs.json").read_text())["pairs"]
    seeds, real = [pair["seed"] for pair in pairs], {arm: _pairs_mean(pairs, arm) for arm in ("host", "peer")}
    line = _fit_expansion(json.loads((BENCHMARKS / "expansion" / "result.json").read_text())["runs"])
    for _ in range(NUM_FITS):
        line = line.times(_simulate_host(line, seeds)["tokens_s"] / real["host"]["tokens_s"])
    simulated = _simulate_peer(line, seeds), _simulate_host(line, seeds)
    yield _row("elasticity", f"{len(pairs)} pairs", "peer", "host", (real["peer"], real["host"]), simulated)


def _pairs_mean(pairs: Sequence[Row], arm: str) -> Row:
    tokens_s = fmean(pair[arm]["borrower_tokens_per_s"] for pair in pairs)
    return {"tokens_s": tokens_s, "tpot_s": fmean(pair[arm]["mean_tpot_ms"] for pair in pairs) / 1e3}


def _simulate_host(line: Line, seeds: Sequence[int]) -> Row:
    """A server that swaps to host memory, and one with all of its memory to itself."""
    swap = {"swap": {"memory": "1GiB", "link": HOST_LINK}}
    borrowers = [simulate(line, _borrower(seed) | swap)["tokens_s"] for seed in seeds]
    lenders = [simulate(line, _lender(seed))["tpot_50_s"] for seed in seeds]
    return {"tokens_s": fmean(borrowers), "tpot_s": fmean(lenders)}


def _simulate_peer(line: Line, seeds: Sequence[int]) -> Row:
    """A server that swaps to memory of the other one."""
    runs = []
    for seed in seeds:
        borrow = {"borrow": {"memory": MOST_LENT, "link": NEIGHBOUR_LINK}, "lenders": {"lender": _lender(seed)}}
        runs.append(simulate(line, _borrower(seed) | borrow))
    ours = {"tokens_s": "tokens_s", "tpot_s": "lender_tpot_50_s"}
    return {name: fmean(run[key] for run in runs) for name, key in ours.items()}


def _borrower(seed: int) -> Row:
    engine = FEW | {"policy": "timely", "kv_blocks": _borrower_blocks()}
    return {"engine": engine, "max_concurrency": SCALE.num_borrower_users, "workload": _of(texts(SAMPLE, seed + 1))}


@cache
def _borrower_blocks() -> int:
    pool_bytes = engine_config("smollm2", SAMPLE, FULL).kv_memory or 0
    return round(pool_bytes * NUM_RESIDENT / FULL.num_resident) // BLOCK_BYTES


def _lender(seed: int) -> Row:
    engine = FEW | {"kv_blocks": LENDER_POOL_BYTES // BLOCK_BYTES}
    return {"engine": engine, "max_concurrency": NUM_LENDER_USERS, "workload": _of(short_texts(SAMPLE, seed))}


def _of(spec: WorkloadSpec) -> Row:
    names = ("num_prompts", "seed", "length_scale", "max_input", "max_output")
    return {name: getattr(spec, name) for name in names} | {"goodput": ["ttft:1000"]}


# -- all --------------------------------------------------------------------------------------------------------------


def _row(bench: str, where: str, way: str, baseline: str, real: tuple[Row, Row], simulated: tuple[Row, Row]) -> Row:
    found: Row = {"bench": bench, "where": where, "way": way, "over": baseline}
    for name in (name for name in MEASURES if name in real[0]):
        engine, ours = (pair[0][name] / pair[1][name] for pair in (real, simulated))
        found[name] = {"engine": engine, "simulated": ours, "error": 100 * (ours / engine - 1)}
    return found


def print_table(rows: Sequence[Row]) -> None:
    """A line for each way: the engine's ratio, the simulator's, and the error of each measure."""
    heads = [f"{name}: engine / simulated | error (%)" for name in ("tokens/s", "TTFT p99", "E2E p99", "TPOT")]
    print("| " + " | ".join(["bench", "where", "way / over", *heads]) + " |")
    print("|---" * (3 + 2 * len(heads)) + "|")
    for row in rows:
        cells = [row["bench"], row["where"], f"{row['way']} / {row['over']}"]
        cells += [_cell(row[name]) if name in row else "- | -" for name in MEASURES]
        print("| " + " | ".join(cells) + " |", flush=True)


def _cell(ratio: Row) -> str:
    return f"{ratio['engine']:.2f} / {ratio['simulated']:.2f} | {ratio['error']:+.0f}"


def main() -> None:
    """Simulate all ways, print the table, and keep the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [*compare_expansion(), *compare_cluster(), *compare_elasticity()]
    print_table(rows)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
