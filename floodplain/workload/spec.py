"""The workload flags, and the requests that they describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from floodplain.core.errors import SettingRefused, UserError
from floodplain.core.flags import changed, flag
from floodplain.workload.arrivals import (
    FloatArray,
    arrival_times,
    chat_like,
    load_lengths,
    phase_arrivals,
    quiet_burst_quiet,
)
from floodplain.workload.prompts import Prompt, PromptMaker, PromptTokenizer, load_prompts, package_prompts
from floodplain.workload.records import LoadRequest
from floodplain.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow, load_trace

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """The limit of every named metric, in ms. SettingRefused for a wrong name, a second one, or no number > 0."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = math.nan
        if name not in GOODPUT_METRICS or not (math.isfinite(limit_ms) and limit_ms > 0):
            form = "ttft:500 tpot:50 e2el:10000 (milliseconds)"
            raise SettingRefused(("goodput",), f"must read like {form}, not {text!r}")
        if name in limits:
            raise SettingRefused(("goodput",), f"names {name} twice")
        limits[name] = limit_ms
    return limits


DEFAULT_NUM_PROMPTS = 100
MAX_REQUESTS = 10_000_000
MAX_TOKENS = 10_000_000
"""Larger numbers count as mistakes."""
SMALLEST, LARGEST = 1e-6, 1e9
"""Bounds on rates, factors and durations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The workload flags of ``bench``; each field is the flag of its name, with ``metadata["help"]``.

    Arrivals come from ``trace``, or from a rate. Lengths come from the trace, else from ``lengths``, else from the
    prompts themselves with chat-like output lengths (``prompts`` given), else they are chat-like. SettingRefused if a
    value is out of its range, or two flags contradict each other.
    """

    trace: Path | None = flag(
        None, "replay arrivals and lengths of an Azure or BurstGPT (CSV) or a Mooncake, aiperf or Dynamo (JSONL) file"
    )
    request_rate: float = flag(math.inf, "mean requests a second; inf sends all at once")
    num_prompts: int | None = flag(None, f"number of requests without a trace (default {DEFAULT_NUM_PROMPTS})")
    burstiness: float = flag(1.0, "1: Poisson arrivals; below 1: burstier; above 1: more even (shape of Gamma gaps)")
    burst_factor: float = flag(1.0, "multiply the rate by this during a burst")
    burst_start: float = flag(30.0, "seconds before the burst begins")
    burst_duration: float = flag(30.0, "seconds that the burst lasts")
    lengths: Path | None = flag(None, "draw lengths from a CSV file with columns prompt_tokens,output_tokens")
    prompts: Path | None = flag(None, 'take texts from a JSONL file with a "prompt" on each line, or a ShareGPT file')
    limit: int | None = flag(None, "use only the first N requests of the trace or prompts")
    speedup: float = flag(1.0, "let a trace's requests arrive this many times faster")
    length_scale: float = flag(1.0, "multiply lengths of prompts and outputs by this (prompts of a file stay whole)")
    max_input: int | None = flag(None, "cut prompts to at most N tokens")
    max_output: int | None = flag(None, "cut outputs to at most N tokens")
    ignore_eos: bool = flag(False, "go on past the end of sequence: outputs are as long as the workload says")
    seed: int = flag(0, "seed of arrivals, lengths and texts")
    goodput: tuple[str, ...] = flag(
        (),
        "a request is good within these limits in ms: ttft:MS tpot:MS e2el:MS (default: five times the medians of "
        "TTFT and TPOT without load, measured before the load)",
    )

    def __post_init__(self) -> None:
        for name in ("num_prompts", "limit"):
            _check_count(name, getattr(self, name), MAX_REQUESTS)
        for name in ("max_input", "max_output"):
            _check_count(name, getattr(self, name), MAX_TOKENS)
        for name in ("burstiness", "burst_factor", "burst_start", "burst_duration", "speedup", "length_scale"):
            _check_factor(name, getattr(self, name))
        if not (math.isinf(self.request_rate) and self.request_rate > 0):
            _check_factor("request_rate", self.request_rate)
        if not 0 <= self.seed < 2**63:
            raise SettingRefused(("seed",), f"must be between 0 and 2**63 - 1, not {self.seed}")
        parse_goodput(self.goodput)
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.trace is not None:
            given = changed(self)
            for name in ("request_rate", "burst_factor", "burstiness", "num_prompts", "lengths"):
                if name in given:
                    hint = "use limit" if name == "num_prompts" else "leave it out"
                    raise SettingRefused((name,), f"does not go with a trace, which says so itself: {hint}")
        elif self.speedup != 1.0:
            raise SettingRefused(("speedup",), "goes with a trace only: raise the request rate instead")
        if self.burst_factor != 1.0 and math.isinf(self.request_rate):
            raise SettingRefused(("burst_factor",), "needs a finite request rate to multiply")


def _check_count(name: str, value: int | None, maximum: int) -> None:
    if value is not None and not 1 <= value <= maximum:
        raise SettingRefused((name,), f"must be between 1 and {maximum}, not {value}")


def _check_factor(name: str, value: float) -> None:
    if not SMALLEST <= value <= LARGEST:
        raise SettingRefused((name,), f"must be between {SMALLEST:g} and {LARGEST:g}, not {value}")


def build(spec: WorkloadSpec, tokenizer: PromptTokenizer, trace: Trace | None = None) -> list[LoadRequest]:
    """The requests that the flags describe, in order of arrival; the same for the same flags and seed.

    ``tokenizer`` is that of the target's model; ``trace`` that of ``spec.trace`` if the caller has read it. Raises
    UserError if a file is unreadable or has the wrong columns.
    """
    arrivals_rng, lengths_rng, text_rng = np.random.default_rng(spec.seed).spawn(3)
    prompts = load_prompts(spec.prompts) if spec.prompts else package_prompts()
    maker = PromptMaker(tokenizer, [prompt.text for prompt in prompts], seed=spec.seed)
    if spec.trace is None and spec.lengths is None and spec.prompts is not None:
        return _verbatim(spec, prompts[: spec.limit], maker, arrivals_rng, lengths_rng)
    rows = _rows(spec, arrivals_rng, lengths_rng, trace)
    block_tokens = prefix_block_tokens(spec)
    return [
        _request(
            spec,
            index,
            row.arrival_s,
            maker.make_prompt_tokens(
                row.prompt_tokens, text_rng, prefix_ids=row.prefix_ids, prefix_block_tokens=block_tokens
            ),
            row.output_tokens,
        )
        for index, row in enumerate(rows)
    ]


def build_rows(spec: WorkloadSpec, trace: Trace | None = None) -> Sequence[TraceRow]:
    """Arrivals and lengths of the requests that ``build`` makes, without their texts.

    ``trace`` and UserError as of ``build``; UserError also if lengths come from the texts of ``prompts``.
    """
    if spec.prompts is not None and spec.trace is None and spec.lengths is None:
        raise UserError("prompts have lengths only with a tokenizer: give trace or lengths")
    arrivals_rng, lengths_rng, _ = np.random.default_rng(spec.seed).spawn(3)
    return _rows(spec, arrivals_rng, lengths_rng, trace)


def prefix_block_tokens(spec: WorkloadSpec) -> int:
    """Tokens of a prompt's block that one of ``TraceRow.prefix_ids`` names."""
    return max(1, round(MOONCAKE_BLOCK_TOKENS * spec.length_scale))


def _rows(
    spec: WorkloadSpec, arrivals_rng: np.random.Generator, lengths_rng: np.random.Generator, trace: Trace | None
) -> Sequence[TraceRow]:
    if trace is None and spec.trace is not None:
        trace = load_trace(spec.trace)
    if trace is None:
        rows: Sequence[TraceRow] = _drawn_rows(spec, arrivals_rng, lengths_rng)
    else:
        rows = trace.scaled(
            limit=spec.limit,
            speedup=spec.speedup,
            length_scale=spec.length_scale,
            max_input=spec.max_input,
            max_output=spec.max_output,
        ).rows
    longest = max(row.prompt_tokens for row in rows)
    if longest > MAX_TOKENS:
        raise UserError(f"a prompt would have {longest} tokens: lower length_scale or give max_input")
    return rows


def _drawn_rows(
    spec: WorkloadSpec, arrivals_rng: np.random.Generator, lengths_rng: np.random.Generator
) -> Sequence[TraceRow]:
    count = min(spec.num_prompts or DEFAULT_NUM_PROMPTS, spec.limit or MAX_REQUESTS)
    drawn = load_lengths(spec.lengths).sample(count, lengths_rng) if spec.lengths else chat_like(count, lengths_rng)
    lengths = drawn.fitted(spec.length_scale, spec.max_input, spec.max_output)
    return [
        TraceRow(float(when), int(prompt), int(output))
        for when, prompt, output in zip(
            _arrivals(spec, count, arrivals_rng), lengths.prompt_tokens, lengths.output_tokens, strict=True
        )
    ]


def _verbatim(
    spec: WorkloadSpec,
    prompts: Sequence[Prompt],
    maker: PromptMaker,
    arrivals_rng: np.random.Generator,
    lengths_rng: np.random.Generator,
) -> list[LoadRequest]:
    """Requests with the prompts of a file as they are, repeated if more requests are needed."""
    count = spec.num_prompts or len(prompts)
    drawn = chat_like(count, lengths_rng).output_tokens
    requests = []
    for index, when in enumerate(_arrivals(spec, count, arrivals_rng)):
        prompt = prompts[index % len(prompts)]
        blocks = [maker.prefix_block(i, MOONCAKE_BLOCK_TOKENS) for i in prompt.prefix_ids]
        tokens = (*(token for block in blocks for token in block), *maker.encode(prompt.text))[: spec.max_input]
        answered = len(maker.encode(prompt.answer)) if prompt.answer else prompt.output_tokens
        output = max(1, round((answered or int(drawn[index])) * spec.length_scale))
        is_whole = not blocks and len(tokens) == len(maker.encode(prompt.text))
        text = prompt.text if is_whole else None
        requests.append(_request(spec, index, float(when), tokens, min(output, spec.max_output or output), text))
    return requests


def _arrivals(spec: WorkloadSpec, count: int, rng: np.random.Generator) -> FloatArray:
    if spec.burst_factor == 1.0:
        return arrival_times(count, spec.request_rate, spec.burstiness, rng)
    phases = quiet_burst_quiet(spec.request_rate, spec.burst_factor, spec.burst_start, spec.burst_duration)
    return phase_arrivals(phases, count, spec.burstiness, rng)


def _request(
    spec: WorkloadSpec,
    index: int,
    arrival_s: float,
    tokens: tuple[int, ...],
    output_tokens: int,
    text: str | None = None,
) -> LoadRequest:
    if output_tokens > MAX_TOKENS:
        raise UserError(f"request {index} wants {output_tokens} output tokens: lower length_scale or give max_output")
    return LoadRequest(
        request_id=f"load-{index}",
        arrival_s=arrival_s,
        prompt=text,
        prompt_token_ids=tokens,
        max_tokens=output_tokens,
        ignore_eos=spec.ignore_eos,
    )
