"""The flags of ``floodplain profile swap``, and checks against engine and workload flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.profiler.llm_flags import check_virtual_engine
from floodplain.workload.spec import WorkloadSpec

_LINE = "seconds of a step, of each decode in it, and of each prompt token"
_MOST_TRIES, _MOST_FACTOR, _MOST_PROMPTS, _MOST_TOKENS = 100, 1000.0, 10**9, 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapProfileConfig:
    """The flags of the verb itself. Raises UserError if a value is out of range or two flags contradict each other."""

    out: Path | None = field(default=None, metadata={"help": "write the profile to this JSON file"})
    steps: Path | None = field(
        default=None,
        metadata={"help": "what steps cost: a file of floodplain profile step; --kv-memory gives the pool"},
    )
    step_line: tuple[float, ...] = field(default=(), metadata={"help": f"instead of --steps: {_LINE}"})
    llm_profile: Path | None = field(
        default=None,
        metadata={"help": "take the stable rate from this file of floodplain profile llm (or give --request-rate)"},
    )
    bursts: tuple[float, ...] = field(
        default=(2.0, 3.0, 5.0), metadata={"help": "bursts of so many times the stable rate (default: 2 3 5)"}
    )
    burst: float = field(default=3.0, metadata={"help": "which of them swap space is needed for"})
    burst_seconds: float = field(default=60.0, metadata={"help": "how long a burst lasts"})
    tries: int = field(default=3, metadata={"help": "tries of each burst, with other seeds; the largest need counts"})
    cached_prompts: int = field(default=0, metadata={"help": "prompts that are to be kept in swap space as prefixes,"})
    cached_tokens: int = field(default=0, metadata={"help": "the longest of which has so many tokens"})
    long_contexts: int = field(default=0, metadata={"help": "contexts at a time that do not fit the device,"})
    long_tokens: int = field(default=0, metadata={"help": "the longest of which has so many tokens"})

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
        if not 1 <= self.tries <= _MOST_TRIES:
            raise UserError(f"--tries must be between 1 and {_MOST_TRIES}, not {self.tries}")
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
        for name, is_given in (
            ("num_prompts", spec.num_prompts is not None),
            ("burst_factor", spec.burst_factor != 1.0),
            ("speedup", spec.speedup != 1.0),
            ("goodput", bool(spec.goodput)),
        ):
            if is_given:
                raise UserError(f"--{name.replace('_', '-')} does not go with --bursts: leave it out")


def _check_pair(count_name: str, count: int, tokens_name: str, tokens: int) -> None:
    if not (0 <= count <= _MOST_PROMPTS and 0 <= tokens <= _MOST_TOKENS):
        raise UserError(f"--{count_name} and --{tokens_name} must be from 0 on".replace("_", "-"))
    if bool(count) != bool(tokens):
        raise UserError(f"--{count_name} goes with --{tokens_name}: give both".replace("_", "-"))
