"""Runs ``floodplain profile swap`` from its flags."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from floodplain.bench.run import read_trace
from floodplain.core.errors import UserError
from floodplain.cost.step_time import LINE_PARTS, StepCost, read_cost
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile, read_profile
from floodplain.model.weights.open_model import open_model
from floodplain.profiler.swap_flags import SwapProfileConfig
from floodplain.profiler.swap_profile import Bursts, BurstServer, profile_swap
from floodplain.profiler.targets import Load
from floodplain.workload.spec import WorkloadSpec
from floodplain.workload.traces import Trace


def run_profile(config: SwapProfileConfig, engine: EngineConfig, spec: WorkloadSpec, *, progress: bool) -> Profile:
    """Profile what the flags describe.

    Args:
        config: Of the verb.
        engine: Of the engine; what applies in virtual time.
        spec: The requests.
        progress: Show a bar.

    Raises:
        UserError: A flag or a file is bad.
    """
    cost, machine = _cost(config)
    bursts = Bursts(
        stable_rate=_stable_rate(config, spec),
        factors=tuple(sorted(set(config.bursts))),
        seconds=config.burst_seconds,
        num_tries=config.tries,
        seed=spec.seed,
    )
    trace = read_trace(spec)
    load = Load(spec, None if trace is None else Trace(trace.rows[: spec.limit]))
    server = BurstServer(engine, open_model(engine.model, engine.seed), cost, load)
    with tqdm(total=len(bursts.factors) * bursts.num_tries, desc="bursts", disable=not progress) as bar:
        return profile_swap(
            server,
            bursts,
            config.burst,
            cached=(config.cached_prompts, config.cached_tokens),
            long=(config.long_contexts, config.long_tokens),
            subject=engine.model,
            machine=machine,
            settings=_settings(config) | {"engine": _settings(engine), "workload": _settings(spec)},
            on_try=bar.update,
        )


def _cost(config: SwapProfileConfig) -> tuple[StepCost, str]:
    """Return (the cost of steps, the machine that it describes)."""
    if config.steps is None:
        return read_cost(dict(zip(LINE_PARTS, config.step_line, strict=True))), "a machine that was described"
    measured = read_profile(config.steps, "step")
    return read_cost(measured.result), measured.machine


def _stable_rate(config: SwapProfileConfig, spec: WorkloadSpec) -> float:
    if config.llm_profile is None:
        return spec.request_rate
    rate = float(read_profile(config.llm_profile, "llm").result["rate_rps"])
    if not rate:
        raise UserError(f"{config.llm_profile} found no rate within its goals: give --request-rate")
    return rate


def _settings(config: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
