"""AQUA-PROFILER for a language model (AQUA, section 4.1): its highest rate within the goals, and the KV it leaves free.

Free bytes are those of the KV pool that no request held at that rate. Memory of the device outside the pool is not
counted: an engine lends pages of its pool alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from floodplain.core.errors import UserError
from floodplain.cost.step_time import read_cost
from floodplain.engine.build import kv_bytes_per_token
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile, read_profile
from floodplain.model.weights.open_model import open_model
from floodplain.observe.terminal import complain
from floodplain.profiler.goals import Score, TryGoals
from floodplain.profiler.kv_use import VllmBlocks
from floodplain.profiler.llm_flags import LlmProfileConfig
from floodplain.profiler.measured import MeasuredTarget
from floodplain.profiler.openings import ServerAddress, open_engine, open_server
from floodplain.profiler.search import Ended, Found, RepeatedTries, find_rate, rate_grid
from floodplain.profiler.targets import Load, Seen, Target
from floodplain.profiler.virtual import VirtualTarget
from floodplain.server.auth import read_keys
from floodplain.workload.goodput import parse_goodput
from floodplain.workload.prompt_form import PromptForm
from floodplain.workload.spec import WorkloadSpec

MOST_TRY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The range, goals and certainty of a search.

    Attributes:
        rates: The lowest and the highest, in requests per second.
        rate_step: Between two rates.
        try_s: Seconds in which the requests of a try arrive.
        tries: The most tries of a rate.
        confidence: A result that is called sure is wrong with at most the rest of the probability.
        seed: Of the first try.
        goals: Of a try.

    Raises:
        UserError: A value is out of its range.
    """

    rates: tuple[float, float]
    rate_step: float
    try_s: float
    tries: int
    confidence: float
    seed: int
    goals: TryGoals

    def __post_init__(self) -> None:
        if not 0 < self.try_s <= MOST_TRY_S:
            raise UserError(f"--try-seconds must be above 0 and at most {MOST_TRY_S:g}, not {self.try_s:g}")
        if not 0 < self.confidence < 1:
            raise UserError(f"--confidence must lie between 0 and 1, not {self.confidence:g}")
        rate_grid(*self.rates, self.rate_step)
        _ = self.test

    @property
    def test(self) -> RepeatedTries:
        """Return the test of one rate. The answer depends on two of them, so each has half of the error."""
        return RepeatedTries(self.tries, (1 - self.confidence) / 2)


@dataclass(frozen=True, slots=True)
class Try:
    """One try and its result."""

    rate: float
    seed: int
    seen: Seen
    score: Score

    def row(self) -> dict[str, Any]:
        """Return its row of a profile. Latencies of a try that was cut are those until then, waits included."""
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


class Profiler:
    """Tries a target until its highest rate is found.

    Args:
        target: What is profiled.
        search: The range and the goals.
        progress: Show a line on standard error.
    """

    def __init__(self, target: Target, search: Search, *, progress: bool) -> None:
        self.tries: list[Try] = []
        self._target = target
        self._search = search
        self._progress = progress

    def run(self) -> Found:
        """Search for the highest rate, and return it."""
        search = self._search
        with tqdm(unit="try", disable=not self._progress) as bar:
            return find_rate(rate_grid(*search.rates, search.rate_step), lambda rate: self._try(rate, bar), search.test)

    def _try(self, rate: float, bar: tqdm[Any]) -> bool:
        bar.set_postfix_str(f"{rate:g} requests/s, {self._tell(rate)}")
        seed = self._search.seed + len(self.tries)
        seen = self._target.run(rate, seed, self._search.try_s)
        score = self._search.goals.score(seen.answers, is_cut=seen.is_cut)
        self.tries.append(Try(rate, seed, seen, score))
        bar.update()
        return score.meets

    def _tell(self, rate: float) -> str:
        before = [one.score.meets for one in self.tries if one.rate == rate]
        return f"{sum(before)} of {len(before)} tries met the goals" if before else "first try"


def profile_llm(
    target: Target,
    search: Search,
    *,
    subject: str,
    settings: Mapping[str, Any],
    threshold_bytes: int,
    progress: bool = False,
    warn: Callable[[str], None],
) -> Profile:
    """Profile a target.

    Args:
        target: A model with its requests.
        search: The range and the goals.
        subject: The model.
        settings: All other settings, for the profile.
        threshold_bytes: A producer has more than this to spare.
        progress: Show a line on standard error.
        warn: Called with each remark, of one line, for the reader.

    Raises:
        UserError: The target does not answer any more.
    """
    profiler = Profiler(target, search, progress=progress)
    found = profiler.run()
    at_rate = [one for one in profiler.tries if one.rate == (found.rate or search.rates[0])]
    for line in remarks(found, profiler.tries, search):
        warn(line)
    return Profile(
        kind="llm",
        subject=subject,
        machine=target.machine,
        is_virtual=target.is_virtual,
        settings=dict(settings),
        result=_result(found, at_rate, threshold_bytes),
        tries=[one.row() for one in profiler.tries],
        errors=_errors(found, at_rate, search),
    )


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


def _errors(found: Found, at_rate: Sequence[Try], search: Search) -> dict[str, Any]:
    """Return how sure the result is; spreads are over the tries at its rate."""
    peaks = [one.seen.peak_kv_bytes for one in at_rate]
    waits = [one.score.ttft_p99_s for one in at_rate if one.score.ttft_p99_s is not None]
    undecided = [rate for rate, judgement in found.judgements.items() if not judgement.is_sure]
    return {
        "confidence": search.confidence,
        "is_sure": found.is_sure,
        "undecided_rps": undecided,
        "tries_at_rate": len(at_rate),
        "peak_kv_spread_bytes": max(peaks) - min(peaks),
        "ttft_p99_spread_s": max(waits) - min(waits) if waits else None,
    }


def remarks(found: Found, tries: Sequence[Try], search: Search) -> list[str]:
    """Return remarks for the reader beside the numbers, a line each."""
    lines = []
    if found.ended is Ended.RANGE:
        lines.append(f"the range ended, not the model: {found.rate:g} requests/s meets the goals; raise --rates")
    if found.ended is Ended.NO_RATE:
        lines.append(f"not even {search.rates[0]:g} requests/s meets the goals: lower --rates, or loosen the goals")
    if not found.is_sure:
        rates = ", ".join(f"{rate:g}" for rate, judgement in found.judgements.items() if not judgement.is_sure)
        fewest = search.test.fewest_sure_tries
        why = f"{search.tries} tries are too few for --confidence" if fewest is None else "its tries disagree"
        lines.append(f"the result is not sure at {rates} requests/s, since {why}: raise --tries")
    failed = sum(one.score.num_failed for one in tries)
    if failed:
        error = next(one.seen.error for one in tries if one.seen.error is not None)
        lines.append(f"{failed} requests failed, the first with: {error}")
    return lines


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
    load = Load.read(spec)
    with _open_target(config, engine, load, search.goals) as target:
        return profile_llm(
            target,
            search,
            subject=engine.model,
            settings=asdict(config) | {"engine": asdict(engine), "workload": asdict(spec)},
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
