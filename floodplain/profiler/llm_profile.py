"""AQUA-PROFILER for a language model (AQUA, section 4.1): its highest rate within the goals, and the KV it leaves free.

Free bytes are those of the KV pool that no request held at that rate: an engine lends pages of its pool alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from floodplain.core.errors import UserError
from floodplain.cost.step_time import read_cost
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile, read_profile, warn_if_foreign
from floodplain.model.weights.open_model import open_model
from floodplain.observe.terminal import complain
from floodplain.profiler.flags import LlmProfileConfig
from floodplain.profiler.goals import Score
from floodplain.profiler.measured import MeasuredTarget, VllmBlocks, measured_target, open_engine, open_server
from floodplain.profiler.search import Ended, Found, find_rate
from floodplain.profiler.targets import Load, Seen
from floodplain.profiler.virtual import VirtualTarget
from floodplain.server.auth import read_keys
from floodplain.web.client import HttpClient
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptForm
from floodplain.workload.spec import WorkloadSpec

Target = MeasuredTarget | VirtualTarget


@dataclass(frozen=True, slots=True)
class Try:
    """One try and its result."""

    rate: float
    seed: int
    seen: Seen
    score: Score

    def row(self) -> dict[str, Any]:
        """Its row of a profile. Latencies of a try that was cut are those until then, waits included."""
        return {
            "rate_rps": self.rate,
            "seed": self.seed,
            "verdict": "met" if self.score.meets else "missed",
            "good_share": self.score.good_share,
            "gap_share": self.score.gap_share,
            "ttft_p99_s": self.score.ttft_p99_s,
            "itl_p99_s": self.score.itl_p99_s,
            "peak_kv_bytes": self.seen.peak_kv_bytes,
            "cut": self.seen.is_cut,
            "failed": self.score.num_failed,
        }


def run_profile(config: LlmProfileConfig, engine: EngineConfig, spec: WorkloadSpec, *, progress: bool) -> Profile:
    """Profile what the flags name; with ``progress``, remarks beside the numbers go to standard error.

    For a server, and in virtual time, only some flags of the engine apply. Raises UserError if a flag or a file is bad,
    or the target does not answer.
    """
    with _open_target(config, engine, Load.read(spec)) as target:
        found, tries = _search(target, config, spec.seed, progress=progress)
        machine, is_virtual = target.machine, target.is_virtual
    at_rate = [one for one in tries if one.rate == (found.rate or config.rates[0])]
    for line in _remarks(found, tries, config) if progress else ():
        complain(line)
    return Profile(
        kind="llm",
        subject=engine.model,
        machine=machine,
        is_virtual=is_virtual,
        settings=asdict(config) | {"engine": asdict(engine), "workload": asdict(spec)},
        result=_result(found, at_rate, config.threshold),
        tries=[one.row() for one in tries],
        errors=_errors(found, at_rate, config.confidence),
    )


def _search(target: Target, config: LlmProfileConfig, seed: int, *, progress: bool) -> tuple[Found, list[Try]]:
    tries: list[Try] = []

    def does_meet(rate: float) -> bool:
        before = [one.score.meets for one in tries if one.rate == rate]
        told = f"{sum(before)} of {len(before)} tries met the goals" if before else "first try"
        bar.set_postfix_str(f"{rate:g} requests/s, {told}")
        seen = target.run(rate, seed + len(tries), config.try_seconds)
        score = config.goals.score(seen.answers, is_cut=seen.is_cut)
        tries.append(Try(rate, seed + len(tries), seen, score))
        bar.update()
        return score.meets

    with tqdm(unit="try", disable=not progress) as bar:
        return find_rate(config.rate_grid, does_meet, config.test), tries


def _result(found: Found, at_rate: Sequence[Try], threshold_bytes: int) -> dict[str, Any]:
    peak_bytes = max(one.seen.peak_kv_bytes for one in at_rate)
    pool_bytes = max(one.seen.kv_bytes for one in at_rate)
    free_bytes = max(0, pool_bytes - peak_bytes) if found.rate else 0
    return {
        "rate_rps": found.rate,
        "peak_kv_bytes": peak_bytes,
        "kv_bytes": pool_bytes,
        "free_bytes": free_bytes,
        "role": "producer" if free_bytes > threshold_bytes else "consumer",
        "threshold_bytes": threshold_bytes,
        "ended_by": found.ended.value,
    }


def _errors(found: Found, at_rate: Sequence[Try], confidence: float) -> dict[str, Any]:
    """How sure the result is; spreads are over the tries at its rate."""
    peaks = [one.seen.peak_kv_bytes for one in at_rate]
    waits = [one.score.ttft_p99_s for one in at_rate if one.score.ttft_p99_s is not None]
    undecided = [rate for rate, judgement in found.judgements.items() if not judgement.is_sure]
    return {
        "confidence": confidence,
        "is_sure": found.is_sure,
        "undecided_rps": undecided,
        "tries_at_rate": len(at_rate),
        "peak_kv_spread_bytes": max(peaks) - min(peaks),
        "ttft_p99_spread_s": max(waits) - min(waits) if waits else None,
    }


def _remarks(found: Found, tries: Sequence[Try], config: LlmProfileConfig) -> list[str]:
    lines = []
    if found.ended is Ended.RANGE:
        lines.append(f"the range ended, not the model: {found.rate:g} requests/s meets the goals; raise --rates")
    if found.ended is Ended.NO_RATE:
        lines.append(f"not even {config.rates[0]:g} requests/s meets the goals: lower --rates, or loosen the goals")
    if not found.is_sure:
        rates = ", ".join(f"{rate:g}" for rate, judgement in found.judgements.items() if not judgement.is_sure)
        fewest = config.test.fewest_sure_tries
        why = f"{config.tries} tries are too few for --confidence" if fewest is None else "its tries disagree"
        lines.append(f"the result is not sure at {rates} requests/s, since {why}: raise --tries")
    failed = sum(one.score.num_failed for one in tries)
    if failed:
        error = next(one.seen.error for one in tries if one.seen.error is not None)
        lines.append(f"{failed} requests failed, the first with: {error}")
    return lines


def _open_target(config: LlmProfileConfig, engine: EngineConfig, load: Load) -> AbstractContextManager[Target]:
    if config.base_url is not None:
        return _server_target(config, config.base_url, engine, load)
    if config.steps is not None:
        return nullcontext(_virtual_target(config.steps, engine, load))
    return measured_target(open_engine(engine), load, config.goals)


def _server_target(
    config: LlmProfileConfig, base_url: str, engine: EngineConfig, load: Load
) -> AbstractContextManager[Target]:
    try:
        source = open_model(config.tokenizer or engine.model)
        tokenizer = source.load_tokenizer()
    except UserError as error:
        raise UserError(f"{error} (prompts need a tokenizer: name one with --tokenizer MODEL)") from None
    api_key = next(iter(read_keys(config.api_key_file))) if config.api_key_file else None
    prompts = PromptForm(config.send or "auto", tokenizer.decode)
    target = HttpTarget(base_url, engine.model, api_key=api_key, prompts=prompts)
    client = HttpClient(base_url.rstrip("/").removesuffix("/v1"), api_key)
    vllm = VllmBlocks(config.kv_block_bytes, kv_bytes_per_token(source.config, engine.dtype))
    return measured_target(open_server(target, client, tokenizer, vllm), load, config.goals)


def _virtual_target(steps: Path, engine: EngineConfig, load: Load) -> VirtualTarget:
    measured = read_profile(steps, "step")
    warn_if_foreign(steps, measured, engine.model, None)
    return VirtualTarget(
        engine, open_model(engine.model, engine.seed), read_cost(measured.result), measured.machine, load
    )
