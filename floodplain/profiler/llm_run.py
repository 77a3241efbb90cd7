"""Runs ``floodplain profile llm`` from its flags: opens the target, profiles it and closes it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from floodplain.bench.run import read_trace
from floodplain.core.errors import UserError
from floodplain.cost.step_time import read_cost
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile, read_profile
from floodplain.model.weights.open_model import open_model
from floodplain.observe.terminal import complain
from floodplain.profiler.goals import TryGoals
from floodplain.profiler.llm_flags import LlmProfileConfig
from floodplain.profiler.llm_profile import Search, profile_llm
from floodplain.profiler.measured import MeasuredTarget
from floodplain.profiler.openings import ServerAddress, open_engine, open_server
from floodplain.profiler.server_kv import VllmBlocks
from floodplain.profiler.targets import Load, Target
from floodplain.profiler.virtual_target import VirtualTarget
from floodplain.server.auth import read_keys
from floodplain.workload.goodput import parse_goodput
from floodplain.workload.prompt_form import PromptForm
from floodplain.workload.spec import WorkloadSpec
from floodplain.workload.traces import Trace


def run_profile(config: LlmProfileConfig, engine: EngineConfig, spec: WorkloadSpec, *, progress: bool) -> Profile:
    """Profile what the flags name.

    Args:
        config: Of the verb.
        engine: Of the engine; for a server and in virtual time only what applies.
        spec: The requests.
        progress: Show a line on standard error, and remarks beside the numbers.

    Raises:
        UserError: A flag or a file is bad, or the target does not answer.
    """
    search = search_of(config, spec.seed)
    trace = read_trace(spec)
    load = Load(spec, None if trace is None else Trace(trace.rows[: spec.limit]))
    with _open_target(config, engine, load, search.goals) as target:
        return profile_llm(
            target,
            search,
            subject=engine.model,
            settings=_settings(config) | {"engine": _settings(engine), "workload": _settings(spec)},
            threshold_bytes=config.threshold,
            progress=progress,
            warn=complain if progress else lambda line: None,
        )


def search_of(config: LlmProfileConfig, seed: int) -> Search:
    """Return the search that the flags describe.

    Raises:
        UserError: A value is out of its range.
    """
    lowest, highest = config.rates
    limits_ms = parse_goodput(config.goodput) or {"ttft": config.ttft_ms}
    goals = TryGoals(
        share=config.share,
        limits_s={name: limit_ms / 1e3 for name, limit_ms in limits_ms.items()},
        gap_s=None if config.goodput else config.itl_ms / 1e3,
    )
    return Search(
        rates=(lowest, highest),
        rate_step=config.rate_step,
        try_s=config.try_seconds,
        tries=config.tries,
        confidence=config.confidence,
        seed=seed,
        goals=goals,
    )


def _open_target(
    config: LlmProfileConfig, engine: EngineConfig, load: Load, goals: TryGoals
) -> AbstractContextManager[Target]:
    if config.base_url is not None:
        return _server_target(config, config.base_url, engine, load, goals)
    if config.steps is not None:
        return nullcontext(_virtual_target(config.steps, engine, load))
    return MeasuredTarget(open_engine(engine), load, goals)


def _server_target(
    config: LlmProfileConfig, base_url: str, engine: EngineConfig, load: Load, goals: TryGoals
) -> MeasuredTarget:
    try:
        source = open_model(config.tokenizer or engine.model)
        tokenizer = source.load_tokenizer()
    except UserError as error:
        raise UserError(f"{error} (prompts need a tokenizer: name one with --tokenizer MODEL)") from None
    api_key = next(iter(read_keys(config.api_key_file))) if config.api_key_file else None
    address = ServerAddress(base_url=base_url, model=engine.model, api_key=api_key)
    vllm = VllmBlocks(config.kv_block_bytes, kv_bytes_per_token(source.config, engine.dtype))
    prompts = PromptForm(config.send or "auto", tokenizer.decode)
    return MeasuredTarget(open_server(address, tokenizer, vllm, prompts), load, goals)


def _virtual_target(steps: Path, engine: EngineConfig, load: Load) -> VirtualTarget:
    measured = read_profile(steps, "step")
    return VirtualTarget(
        engine, open_model(engine.model, engine.seed), read_cost(measured.result), measured.machine, load
    )


def _settings(config: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
