"""The flags of ``floodplain profile`` llm, swap and step, and checks against engine and workload flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from floodplain.core.errors import UserError, flag_name
from floodplain.core.flags import changed, check_between, flag
from floodplain.engine.config import EngineConfig
from floodplain.profiler.goals import TryGoals
from floodplain.profiler.search import RepeatedTries, rate_grid
from floodplain.web.address import check_base_url
from floodplain.workload.prompts import SEND_HELP, WAYS
from floodplain.workload.spec import WorkloadSpec, parse_goodput

MOST_TRY_S = 86400.0
DEFAULT_THRESHOLD_BYTES = 10 * 10**9
"""AQUA's: a producer has more than this to spare."""
DEFAULT_TTFT_MS, DEFAULT_ITL_MS = 1000.0, 100.0
"""AQUA's goals for chat, at the 99th percentile."""
_SERVER_FLAGS = ("model", "dtype", "seed")
_VIRTUAL_FLAGS = (
    "model", "dtype", "seed", "policy", "slice", "ttft_goal", "tpot_goal", "pace", "max_gap", "line_patience",
    "fair_by", "kv_memory", "block_tokens", "max_batched_tokens", "max_num_seqs", "max_model_len",
    "enable_prefix_caching", "swap", "swap_memory", "hardware",
)  # fmt: skip
"""Flags of an engine that apply to a server, or to the loop in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmProfileConfig:
    """The flags of the verb itself. Raises UserError if a value is out of range or two flags contradict each other."""

    out: Path | None = flag(None, "write the profile to this JSON file")
    base_url: str | None = flag(
        None,
        "profile the OpenAI server there, ours or vLLM, which calls its model MODEL (default: an "
        "engine in this process)",
    )
    tokenizer: str | None = flag(None, "with --base-url, model with its tokenizer and shape (default: MODEL)")
    api_key_file: Path | None = flag(None, "with --base-url, file with the key to send")
    send: str | None = flag(None, f"with --base-url, {SEND_HELP}", choices=WAYS)
    kv_block_bytes: int | None = flag(
        None, "with --base-url of vLLM, bytes of a KV block on one GPU (default: by the model's shape)", size=True
    )
    steps: Path | None = flag(
        None,
        "profile in virtual time, with steps as in this file of floodplain profile step; MODEL gives "
        "the shape, --kv-memory the pool",
    )
    rates: tuple[float, ...] = flag((0.5, 10.0), "lowest and highest requests per second (default: 0.5 10)")
    rate_step: float = flag(0.5, "requests per second between two rates")
    try_seconds: float = flag(60.0, "seconds in which the requests of a try arrive")
    tries: int = flag(5, "most tries of one rate")
    confidence: float = flag(0.9, "a result that says it is sure is right so often")
    ttft_ms: float = flag(DEFAULT_TTFT_MS, "goal of a first token, in ms")
    itl_ms: float = flag(DEFAULT_ITL_MS, "goal of the time between two tokens, in ms")
    goodput: tuple[str, ...] = flag((), "instead of both: goals of a request in ms, ttft:MS tpot:MS e2el:MS")
    share: float = flag(0.99, "part of the requests, and of the times between tokens, within the goals")
    threshold: int = flag(DEFAULT_THRESHOLD_BYTES, "a producer has more than this to spare (default: 10GB)", size=True)

    def __post_init__(self) -> None:
        if len(self.rates) != 2:
            raise UserError(f"--rates takes the lowest and the highest rate, not {len(self.rates)} numbers")
        for name in ("ttft_ms", "itl_ms"):
            if not 0 < getattr(self, name) < 1e9:
                raise UserError(f"{flag_name(name)} must be above 0, not {getattr(self, name):g}")
        if self.goodput and (self.ttft_ms, self.itl_ms) != (DEFAULT_TTFT_MS, DEFAULT_ITL_MS):
            raise UserError("--goodput names all goals itself: leave out --ttft-ms and --itl-ms")
        if not 0 < self.try_seconds <= MOST_TRY_S:
            raise UserError(f"--try-seconds must be above 0 and at most {MOST_TRY_S:g}, not {self.try_seconds:g}")
        if not 0 < self.confidence < 1:
            raise UserError(f"--confidence must lie between 0 and 1, not {self.confidence:g}")
        _ = self.goals, self.rate_grid, self.test  # which check the other numbers
        if self.base_url is not None:
            check_base_url(self.base_url)
        if self.base_url is not None and self.steps is not None:
            raise UserError("--base-url measures a server and --steps computes: leave one of them out")
        for name in ("tokenizer", "api_key_file", "send", "kv_block_bytes"):
            if getattr(self, name) is not None and self.base_url is None:
                raise UserError(f"{flag_name(name)} is of a server: give its address with --base-url")

    @property
    def goals(self) -> TryGoals:
        """The goals of a try."""
        limits_ms = parse_goodput(self.goodput) or {"ttft": self.ttft_ms}
        return TryGoals(
            share=self.share,
            limits_s={name: limit_ms / 1e3 for name, limit_ms in limits_ms.items()},
            gap_s=None if self.goodput else self.itl_ms / 1e3,
        )

    @property
    def rate_grid(self) -> list[float]:
        """The rates to search."""
        lowest, highest = self.rates
        return rate_grid(lowest, highest, self.rate_step)

    @property
    def test(self) -> RepeatedTries:
        """The test of one rate. The answer depends on two of them, so each has half of the error."""
        return RepeatedTries(self.tries, (1 - self.confidence) / 2)

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse flags of an engine that do not apply to what is profiled, with a UserError."""
        if self.base_url is not None:
            _refuse_others(engine, _SERVER_FLAGS, "a server has its own; leave it out with --base-url")
        elif self.steps is not None:
            check_virtual_engine(engine)
        elif engine.coordinator is not None:
            raise UserError("--coordinator: an engine is profiled alone, with all of its memory: leave it out")


def check_virtual_engine(engine: EngineConfig) -> None:
    """Refuse flags of an engine that do not apply in virtual time, or a missing pool size, with a UserError."""
    _refuse_others(engine, _VIRTUAL_FLAGS, "nothing computes in virtual time; leave it out with --steps")
    if engine.kv_memory is None:
        raise UserError("--steps needs --kv-memory: nothing says how large the KV pool is")
    if engine.swap == "peer":
        raise UserError("--swap peer borrows from neighbours, and in virtual time there are none: use host")


def check_load(spec: WorkloadSpec) -> None:
    """Refuse flags of a workload that the search decides, with a UserError."""
    given = changed(spec)
    if spec.trace is not None or (spec.prompts is not None and spec.lengths is None):
        given.pop("limit", None)  # it cuts the trace or the prompts
    for name, instead in (
        ("request_rate", "give --rates"),
        ("num_prompts", "give --try-seconds"),
        ("burst_factor", "tries have one rate each; see floodplain profile swap"),
        ("speedup", "a trace is stretched to each rate: give --rates"),
        ("limit", "give --try-seconds"),
    ):
        if name in given:
            raise UserError(f"{flag_name(name)} does not go with a search for the rate: {instead}")


def _refuse_others(engine: EngineConfig, known: tuple[str, ...], why: str) -> None:
    for name in changed(engine):
        if name not in known:
            raise UserError(f"{flag_name(name)}: {why}")


_LINE = "seconds of a step, of each decode in it, and of each prompt token"
_MOST_TRIES, _MOST_FACTOR, _MOST_PROMPTS, _MOST_TOKENS = 100, 1000.0, 10**9, 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapProfileConfig:
    """The flags of the verb itself. Raises UserError if a value is out of range or two flags contradict each other."""

    out: Path | None = flag(None, "write the profile to this JSON file")
    steps: Path | None = flag(None, "what steps cost: a file of floodplain profile step; --kv-memory gives the pool")
    step_line: tuple[float, ...] = flag((), f"instead of --steps: {_LINE}")
    llm_profile: Path | None = flag(
        None, "take the stable rate from this file of floodplain profile llm (or give --request-rate)"
    )
    bursts: tuple[float, ...] = flag((2.0, 3.0, 5.0), "bursts of so many times the stable rate (default: 2 3 5)")
    burst: float = flag(3.0, "which of them swap space is needed for")
    burst_seconds: float = flag(60.0, "how long a burst lasts")
    tries: int = flag(3, "tries of each burst, with other seeds; the largest need counts")
    cached_prompts: int = flag(0, "prompts that are to be kept in swap space as prefixes,")
    cached_tokens: int = flag(0, "the longest of which has so many tokens")
    long_contexts: int = flag(0, "contexts at a time that do not fit the device,")
    long_tokens: int = flag(0, "the longest of which has so many tokens")

    def __post_init__(self) -> None:
        if (self.steps is None) == (not self.step_line):
            raise UserError("what do steps cost? Give --steps FILE or --step-line, one of them")
        if self.step_line and (len(self.step_line) != 3 or not all(0 <= part < 3600 for part in self.step_line)):
            raise UserError(f"--step-line takes three numbers from 0 to 3600: {_LINE}")
        if not all(1 <= factor <= _MOST_FACTOR for factor in self.bursts):
            raise UserError(f"--bursts must be between 1 and {_MOST_FACTOR:g} times the stable rate")
        if self.burst not in self.bursts:
            raise UserError(f"--burst {self.burst:g} must be one of --bursts")
        if not 0 < self.burst_seconds <= 86400:
            raise UserError(f"--burst-seconds must be above 0 and at most 86400, not {self.burst_seconds:g}")
        check_between(self, "tries", 1, _MOST_TRIES)
        _check_pair("cached_prompts", self.cached_prompts, "cached_tokens", self.cached_tokens)
        _check_pair("long_contexts", self.long_contexts, "long_tokens", self.long_tokens)

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse flags of an engine that do not apply here, with a UserError."""
        check_virtual_engine(engine)
        if engine.swap == "none":
            raise UserError("--swap none has no swap space to profile: leave it out")

    def check_load(self, spec: WorkloadSpec) -> None:
        """Refuse flags that the bursts decide, and zero or two flags of the stable rate, with a UserError."""
        if math.isfinite(spec.request_rate) == (self.llm_profile is not None):
            raise UserError("what is the stable rate? Give --request-rate, or --llm-profile FILE")
        for name in ("num_prompts", "burst_factor", "speedup", "goodput"):
            if name in changed(spec):
                raise UserError(f"{flag_name(name)} does not go with --bursts: leave it out")


def _check_pair(count_name: str, count: int, tokens_name: str, tokens: int) -> None:
    if not (0 <= count <= _MOST_PROMPTS and 0 <= tokens <= _MOST_TOKENS):
        raise UserError(f"--{count_name} and --{tokens_name} must be from 0 on".replace("_", "-"))
    if bool(count) != bool(tokens):
        raise UserError(f"--{count_name} goes with --{tokens_name}: give both".replace("_", "-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfileConfig:
    """The flags of ``profile step`` beside the engine's. Raises UserError if a value is out of range."""

    out: Path = field(metadata={"help": "write the profile to this JSON file"})
    shapes: int = flag(64, "steps of so many sizes")
    repeats: int = flag(5, "measure each at most so often; its median counts")
    step_seconds: float = flag(60.0, "measure for at most so many seconds", metavar="S")

    def __post_init__(self) -> None:
        if not 1 <= self.shapes <= 10_000:
            raise UserError(f"--shapes must be between 1 and 10000, not {self.shapes}")
        if not 1 <= self.repeats <= 1000:
            raise UserError(f"--repeats must be between 1 and 1000, not {self.repeats}")
        if not 0 < self.step_seconds <= 86400:
            raise UserError(f"--step-seconds must be above 0 and at most 86400, not {self.step_seconds}")
