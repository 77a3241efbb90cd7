"""What lending does for 1,000 GPUs over a day: requests by a sample of GPUs, leases of all. See README.md."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.simulate.planning.day import SLOT_S, Day
from examples.simulate.planning.gpus import BORROWER, HERE, LENDER, Gpus, read_gpus
from examples.simulate.planning.lease_day import simulate_leases
from examples.simulate.planning.windows import VARIANTS, Window, draw_sample, simulate_window
from floodplain.core.errors import UserError
from floodplain.files.yaml_file import read_yaml_mapping
from floodplain.observe.strict_json import save_result


def estimate(windows: Sequence[Window], gpus: Gpus, content: Mapping[str, Any]) -> dict[str, Any]:
    """Requests of the day, and the shares within their goals; ``+-`` is the standard error over the strata."""
    kept = {variant: np.array([window.kept[variant] for window in windows]) for variant in VARIANTS}
    weights = np.array([window.num_requests[1] for window in windows], dtype=float)
    lenders = np.array([window.lender_kept for window in windows])
    requests = {
        BORROWER: gpus.rates[BORROWER].sum() * SLOT_S * content["workload"]["request_rate"],
        LENDER: gpus.rates[LENDER].sum() * SLOT_S * content["lenders"][LENDER]["workload"]["request_rate"],
    }
    gain = kept["lent memory"] - kept["host memory"]
    return {
        "requests": {model: round(float(number)) for model, number in requests.items()},
        "kept": {variant: [float(part.mean()), _error(part)] for variant, part in kept.items()},
        "gain_of_lent_over_host": [float(gain.mean()), _error(gain)],
        "lenders_kept": dict(zip(("alone", "lending"), np.average(lenders, axis=0, weights=weights), strict=True)),
    }


def _error(parts: NDArray[np.float64]) -> float:
    return float(parts.std(ddof=1) / np.sqrt(len(parts))) if len(parts) > 1 else 0.0


MOST_DEVICES = 3000
"""With the other members of that benchmark, a coordinator takes no more."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate, print, write ``--out``, and return the result; exits with one line if an argument is not usable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("placement", type=Path, help="of floodplain place cluster.yaml --out")
    parser.add_argument("--trace", type=Path, help="hours and lengths of this BurstGPT file, in place of day.py's")
    parser.add_argument("--strata", type=int, default=8, help="windows that are simulated token by token")
    parser.add_argument("--window", type=float, default=45.0, help="seconds of arrivals in a window")
    parser.add_argument("--slots", type=int, default=86_400 // SLOT_S, help="slots of 5 minutes for which leases run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args(argv)
    if args.strata < 1 or args.window <= 0 or not 1 <= args.slots <= 86_400 // SLOT_S:
        parser.error("--strata and --window must be above 0, and --slots between 1 and those of a day")
    try:
        return _run(args)
    except UserError as error:
        parser.error(str(error))


def _run(args: argparse.Namespace) -> dict[str, Any]:
    day, content = Day(args.seed, args.trace), read_yaml_mapping(HERE / "pair.yaml", 2**16, 6, "scenario")
    gpus, began_s = read_gpus(args.placement, day), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        day.write_lengths(Path(folder) / "lengths.csv")
        windows = _simulate_windows(gpus, content, Path(folder) / "lengths.csv", args, day.rng)
    windows_s = time.process_time() - began_s
    leases = simulate_leases(gpus, windows, content, args.slots, args.seed)
    result = {
        "gpus": {model: len(names) for model, names in gpus.names.items()},
        "estimate": estimate(windows, gpus, content),
        "leases": leases,
        "cpu_s": {"windows": windows_s, "leases": time.process_time() - began_s - windows_s},
        "windows": [
            {"rates": w.rates, "requests": w.num_requests, "kept": dict(w.kept), "lender_kept": w.lender_kept,
             "leases": dict(w.leases)}
            for w in windows
        ],
    }  # fmt: skip
    print(describe(result))
    if args.out is not None:
        save_result(args.out, result)
    return result


def _simulate_windows(
    gpus: Gpus, content: Mapping[str, Any], lengths: Path, args: argparse.Namespace, rng: np.random.Generator
) -> list[Window]:
    chat = content["lenders"][LENDER]
    content = content | {
        "workload": content["workload"] | {"lengths": str(lengths)},
        "lenders": {LENDER: chat | {"workload": chat["workload"] | {"lengths": str(lengths)}}},
    }
    windows = []
    for number, (name, slot) in enumerate(draw_sample(gpus, args.strata, rng)):
        lender = gpus.pairs.get(name, [gpus.names[LENDER][0]])[0]
        rates = gpus.rate(BORROWER, name, slot), gpus.rate(LENDER, lender, slot)
        windows.append(simulate_window(content, rates, args.window, args.seed * 1000 + number))
        kept = ", ".join(f"{variant} {share:.1%}" for variant, share in windows[-1].kept.items())
        print(f"window {number + 1} of {args.strata}, loads {rates[0]:.2f} and {rates[1]:.2f}: {kept}", flush=True)
    return windows


def describe(result: Mapping[str, Any]) -> str:
    """The answers, for a terminal."""
    leases, found = result["leases"], result["estimate"]
    kept = ", ".join(f"{variant} {mean:.1%} +- {error:.1%}" for variant, (mean, error) in found["kept"].items())
    per_s = leases["messages_per_s"]
    rate = max(1, round(per_s["operations_max"]))
    outcomes = ", ".join(
        f"{number} {name} ({leases['bytes'][name] / 1e12:.1f} TB)" for name, number in leases["leases"].items()
    )
    lent, kv = leases["lent_bytes"], leases["recalled_kv_bytes"]
    alone, lending = found["lenders_kept"]["alone"], found["lenders_kept"]["lending"]
    beats, cpu_s = per_s["heartbeats_at_most"], result["cpu_s"]
    devices = min(5 * beats, MOST_DEVICES)
    return f"""{found["requests"][BORROWER]:,} requests of {BORROWER} in a day, within their goals: {kept}
{found["requests"][LENDER]:,} requests of {LENDER}, within their goals: alone {alone:.1%}, lending {lending:.1%}
lent: {lent["mean"] / 1e12:.2f} TB in the mean, {lent["max"] / 1e12:.2f} TB at most
leases: {outcomes}; {leases["bytes"]["live"] / 1e12:.2f} TB live at the end
KV on recalled or lost leases: {kv["to_host"] / 1e12:.2f} TB to host memory, {kv["recomputed"] / 1e12:.3f} TB recomputed
needed and not on a lease: {leases["needed_without_lease"]:.1%} of bytes times seconds
messages: {per_s["operations_mean"]:.1f} a second in the mean, {rate} in the busiest second; and {beats} heartbeats
the real store at that rate:
  python benchmarks/coordinator/run.py --rate {rate} --devices {devices} --seconds 30 --seeds 1 --out store.json
processor: {cpu_s["windows"]:.0f} s for windows, {cpu_s["leases"]:.0f} s for leases"""


if __name__ == "__main__":
    main()
