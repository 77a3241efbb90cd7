"""``floodplain simulate SCENARIO.yaml``: what a load would do to hardware that is not here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floodplain.cli.options import add_verb, dataclass_from
from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.files.extras import require
from floodplain.files.results import check_writable
from floodplain.observe.terminal import complain, say

TENANT_ROWS = (
    ("goals met (%)", "slo_attainment", 100.0),
    ("TTFT p99 (s)", "p99_ttft_ms", 1e-3),
    ("TPOT p99 (ms)", "p99_tpot_ms", 1.0),
    ("E2E p99 (s)", "p99_e2el_ms", 1e-3),
    ("done", "completed", 1.0),
)
"""(heading, key of what a tenant got, factor from the key's unit to the heading's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """The flags of the verb. UserError if they contradict each other."""

    scenario: Path | None = flag(None, "YAML file with model, device, engine and load", positional=True)
    compare: Path | None = flag(
        None,
        "replay the requests of a real run of vLLM in this folder (requests.jsonl, meta.json, timeseries.csv), and "
        "print the errors of the simulation",
        metavar="FOLDER",
    )
    set: tuple[str, ...] = flag((), "values in place of the scenario's, such as engine.policy=fcfs")
    sweep: tuple[str, ...] = flag((), "simulate every combination of values, such as engine.policy=fcfs,timely")
    out: Path | None = flag(None, "write the result, or those of a sweep, to this JSON file")
    trace_out: Path | None = flag(None, "write a Chrome trace of all requests to this JSON file (Perfetto opens it)")
    plot: bool = flag(False, "draw pictures beside the result (needs --out)")

    def __post_init__(self) -> None:
        if self.plot and self.out is None:
            raise UserError("--plot draws beside the result: give --out FILE too")
        if self.compare is not None and self.sweep:
            raise UserError("--compare holds one simulation to a real run: leave --sweep out")
        if self.scenario is None and self.compare is None and not self.set:
            raise UserError("name a scenario: floodplain simulate SCENARIO.yaml")


def add_parser(verbs: Any) -> None:
    """Add the verb and its flags."""
    about = "Say what a load would do to hardware that is not here, in virtual time."
    add_verb(verbs, "simulate", about, SimulateConfig)


def run(args: argparse.Namespace) -> int:
    """Simulate; 0 if every request could be served."""
    config = dataclass_from(args, SimulateConfig)
    for name, path, other in (("--out", config.out, config.trace_out), ("--trace-out", config.trace_out, None)):
        if path is not None:
            check_writable(path, name, config.scenario, other)
    if config.plot:
        require("--plot", "matplotlib")
    runs = [_compare(config, config.compare)] if config.compare else _simulate(config, quiet=args.quiet)
    _report(args, config, runs)
    if skipped := max(result["floodplain"]["skipped_rows"] or 0 for _, result in runs):
        complain(f"{skipped} rows of traces are skipped: they record no prompt or no output token")
    failed = sum(int(result["failed"]) for _, result in runs)
    if failed:
        complain(f"{failed} requests are longer than the model or the KV pool allows, and were refused")
    return 1 if failed else 0


Run = tuple[str, dict[str, Any]]


def _compare(config: SimulateConfig, folder: Path) -> Run:
    from floodplain.sim.compare import compare, read_run
    from floodplain.sim.prediction import predict
    from floodplain.sim.scenario import read_scenario

    real = read_run(folder)
    scenario = read_scenario(config.scenario, config.set, real.sets)
    _check_detailed("--compare", scenario.detailed)
    prediction = predict(scenario, real.rows)
    if prediction.result["failed"]:
        raise UserError(
            f"{folder}: {prediction.result['failed']} of its requests do not fit: raise engine.max_model_len"
        )
    return "simulated", prediction.result | {"compare": compare(real, prediction)}


def _simulate(config: SimulateConfig, *, quiet: bool) -> list[Run]:
    from floodplain.sim.scenario import read_scenario
    from floodplain.sim.sets import sweep_of
    from floodplain.sim.sweeping import predict_all

    sweep = sweep_of(config.sweep)
    scenarios = [read_scenario(config.scenario, (*config.set, *sets)) for sets in sweep]
    for name, is_given in (("--plot", config.plot), ("--trace-out", config.trace_out)):
        _check_detailed(name, not is_given or all(scenario.detailed for scenario in scenarios))
    names = [" ".join(sets) or (config.scenario.stem if config.scenario else "simulated") for sets in sweep]
    return list(zip(names, predict_all(scenarios, shows_progress=not quiet), strict=True))


def _check_detailed(name: str, is_detailed: bool) -> None:
    if not is_detailed:
        raise UserError(f"{name} reads what became of each request: leave detailed=false out")


def _report(args: argparse.Namespace, config: SimulateConfig, runs: Sequence[Run]) -> None:
    from floodplain.observe.strict_json import save_result, to_json

    result = runs[0][1] if not config.sweep else {"runs": [{"name": name, **each} for name, each in runs]}
    try:
        if config.out is not None:
            save_result(config.out, result)
            if config.plot:
                from floodplain.observe.plots import save_plots

                folder = config.out.parent / f"{config.out.stem}-plots"
                save_plots(runs, folder)
                if not args.quiet:
                    complain(f"pictures are in {folder}")
        if config.trace_out is not None:
            from floodplain.observe.residence import chrome_trace

            save_result(config.trace_out, chrome_trace(runs))
    finally:  # shown even if it cannot be saved
        say(to_json(result) if args.format == "json" else _describe(runs))


def _describe(runs: Sequence[Run]) -> str:
    from floodplain.observe.table import format_table, summary_table

    parts = [format_table(*summary_table(runs))]
    first = runs[0][1]
    facts = first["floodplain"]["simulation"]
    parts.append(f"{facts['kv_blocks']} KV blocks an instance; a step's time: {facts['step_cost']}")
    for name, result in runs:
        parts += _describe_extras(name, result["floodplain"]["simulation"])
    if "compare" in first:
        parts.append(_describe_errors(first["compare"]))
    return "\n\n".join(parts)


def _describe_extras(name: str, facts: Mapping[str, Any]) -> list[str]:
    """What tenants and lenders got, what became of leases, recalls, streamed layers, and drops."""
    from floodplain.observe.table import format_number

    parts = [_describe_groups(name, facts[key]) for key in ("tenants", "lenders") if facts.get(key)]
    if "leases" in facts:
        parts.append(f"{name}: {_describe_leases(facts['leases'])}")
    if recalls_s := facts["recalls_s"]:
        mean, longest = format_number(sum(recalls_s) / len(recalls_s)), format_number(max(recalls_s))
        parts.append(f"{name}: lent memory was recalled {len(recalls_s)} times, in {mean} s, at most {longest} s")
    if streamed := facts["most_streamed_layers"]:
        stall = format_number(facts["stream_stall_s"])
        parts.append(f"{name}: up to {streamed} layers streamed, and compute waited {stall} s for copies")
    if facts["relief"]:
        parts.append(f"{name}: {_describe_relief(facts['relief']['transitions'])}")
    return parts


def _describe_groups(name: str, groups: Mapping[str, Any]) -> str:
    from floodplain.observe.table import format_number, format_table

    rows = [
        [group, *(format_number(None if got[key] is None else got[key] * factor) for _, key, factor in TENANT_ROWS)]
        for group, got in groups.items()
    ]
    return format_table([name, *(heading for heading, _, _ in TENANT_ROWS)], rows)


def _describe_leases(leases: Mapping[str, Any]) -> str:
    from floodplain.core.sizes import show_size

    outcomes = ", ".join(
        f"{leases['leases'][name]} {name} ({show_size(leases['bytes'][name])})" for name in leases["leases"]
    )
    moved = show_size(leases["moved_to_host_bytes"])
    return f"leases: {outcomes}; KV of {moved} moved to host memory, {leases['forced']} leases freed before it had"


def _describe_relief(transitions: Sequence[Mapping[str, Any]]) -> str:
    from floodplain.observe.table import format_number

    drops = [one for one in transitions if one["is_drop"]]
    if not drops:
        return "no layers were dropped"
    when = ", ".join(
        f"at {format_number(one['when_s'])} s by {len(one['instances'])} instances "
        f"({one['num_blocks_before']} KV blocks became {one['num_blocks']}, in {format_number(one['usable_s'])} s)"
        for one in drops
    )
    kv, parameters = (
        format_number(sum(one[key] for one in transitions) / 1e9) for key in ("kv_bytes", "parameter_bytes")
    )
    restored = f"{len(transitions) - len(drops)} instances were restored"
    return f"layers were dropped {when}; {restored}; {kv} GB of KV and {parameters} GB of parameters crossed links"


def _describe_errors(errors: Mapping[str, Any]) -> str:
    from floodplain.observe.table import format_number, format_table
    from floodplain.sim.compare import error_table, show_error

    lines = [format_table(*error_table(errors)), f"makespan {show_error(errors['makespan'])} %"]
    if errors["kv_blocks"] is not None:
        lines.append(f"KV blocks {errors['kv_blocks']:+.1f} %, predicted from the device's memory")
    if errors["mean_difference"]:
        lines.append(
            "mean difference over time: "
            + ", ".join(f"{format_number(value)} {name}" for name, value in errors["mean_difference"].items())
        )
    return "\n".join(lines)
