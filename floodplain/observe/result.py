"""The result of a benchmark, measured at the client, under the keys of ``vllm bench serve --save-detailed``.

Definitions: ``docs/metrics.md``. A number that does not exist is None, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

import floodplain
from floodplain.core import lifecycle
from floodplain.observe.load_table import AllGaps, Floats, LoadTable, summarise
from floodplain.workload.records import RequestRecord
from floodplain.workload.spec import parse_goodput


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes written to and read from one tier, backups included."""

    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """KV that swapping moved; ``backup_bytes`` are those of requests that still ran.

    ``stall_s`` is the time in which requests were live and nothing could run before a copy ended; ``failed_transfers``
    are incomplete copies, by problem, whose KV was recomputed.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    backup_bytes: int = 0
    stall_s: float = 0.0
    by_tier: Mapping[str, TierTraffic] = field(default_factory=dict)
    failed_transfers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionReport:
    """The cost of streamed layers.

    Attributes:
        expansion: Blocks of the pool at the end, over those without streamed layers.
        in_bytes: KV loaded for steps.
        out_bytes: KV written to copies.
        limited: Why the expansion was not larger at the end; None if it was as large as requested.
    """

    expansion: float = 1.0
    streamed_layers: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    stall_s: float = 0.0
    limited: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareReport:
    """The hardware of a run: ``name`` is for example the GPU's, or ``emulated-… on …`` when links are emulated.

    A mapping of ``links`` has ``tier``, ``name``, ``emulated``, ``bandwidth`` (bytes per second of a large copy, slower
    way); of an emulated one also ``modelled_bandwidth``, ``slowdown`` (their ratio, the same for all) and ``source``.
    """

    name: str
    emulated: bool
    links: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The facts of a run that only the engine has.

    ``wasted_tokens`` were sampled for a sequence that had ended while the step ran; ``scheduler_s`` is the loop's own
    time, planning and taking in results, over all steps.
    """

    preemptions: int
    recomputed_tokens: int
    wasted_tokens: int
    steps: int
    scheduler_s: float
    swap: SwapReport = field(default_factory=SwapReport)
    expansion: ExpansionReport = field(default_factory=ExpansionReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The facts of a run, for the head of the result.

    Attributes:
        backend: ``floodplain`` (in process) or ``openai`` (over HTTP).
        request_rate: As asked; infinity when all were sent at once; None for a trace.
        max_concurrency: As asked; None: open loop.
        skipped_rows: Rows of the trace's file that could not be replayed; None without a trace.
        goodput: The limits of a good request, ``ttft:MS …``: as asked, or measured (``workload.goals``).
    """

    backend: str
    model_id: str
    tokenizer_id: str
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    skipped_rows: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    goodput: tuple[str, ...] = ()
    hardware: HardwareReport | None = None


def benchmark_result(
    records: Sequence[RequestRecord],
    info: RunInfo,
    engine: EngineReport | None = None,
    timeline: Mapping[str, Sequence[float]] | None = None,
    *,
    save_tokens: bool = False,
) -> dict[str, Any]:
    """A benchmark result as a JSON object; ``records`` are in the order of the workload, ``timeline`` is for plots.

    Without ``engine``, whose counts they are, its keys are null.
    """
    table = LoadTable(AllGaps(), min((record.sent_s for record in records), default=0.0))
    for record in records:
        table.add(record)
    rows = _per_request(records)
    if save_tokens:
        rows["output_token_ids"] = [record.output_token_ids for record in records]
    result = summary_result(table, info, engine, timeline)
    own = result.pop("floodplain")
    return {**result, **rows, "floodplain": own}


def summary_result(
    table: LoadTable,
    info: RunInfo,
    engine: EngineReport | None = None,
    timeline: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """As ``benchmark_result``, without the lists that have an entry for each request."""
    goals_ms = parse_goodput(info.goodput)
    own = {
        "version": floodplain.__version__,
        "config": dict(info.config),
        "hardware": asdict(info.hardware) if info.hardware else None,
        **_engine(engine),
        **_gaps(table),
        "max_send_lag_s": table.max_lag_s,
        "seed": info.seed,
        "goals_ms": goals_ms,
        "skipped_rows": info.skipped_rows,
    }
    if timeline is not None:
        own["timeline"] = {name: list(values) for name, values in timeline.items()}
    return {
        **_head(info, table.num_requests),
        **_totals(table),
        **_attainment(table, goals_ms),
        **_statistics(table),
        **_peaks(table),
        "floodplain": own,
    }


def _head(info: RunInfo, num_requests: int) -> dict[str, Any]:
    rate = info.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": info.backend,
        "endpoint_type": info.backend,
        "model_id": info.model_id,
        "tokenizer_id": info.tokenizer_id,
        "num_prompts": num_requests,
        "request_rate": "inf" if rate is not None and math.isinf(rate) else rate,
        "burstiness": info.burstiness,
        "max_concurrency": info.max_concurrency,
    }


def _totals(table: LoadTable) -> dict[str, Any]:
    num_inputs, num_outputs = table.num_prompt_tokens, sum(table.num_tokens)
    return {
        "duration": table.end_s,
        "completed": table.num_completed,
        "failed": table.num_requests - table.num_completed,
        "total_input_tokens": num_inputs,
        "total_output_tokens": num_outputs,
        "request_throughput": _rate(table.num_completed, table.end_s),
        "output_throughput": _rate(num_outputs, table.end_s),
        "total_token_throughput": _rate(num_inputs + num_outputs, table.end_s),
    }


def _rate(count: float, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _attainment(table: LoadTable, limits_ms: Mapping[str, float]) -> dict[str, float | None]:
    """Share and rate of requests within all limits; TPOT counts as 0 for one token, as in vLLM. None without limits."""
    if not limits_ms:
        return {"slo_attainment": None, "request_goodput": None}
    is_good = np.ones(table.num_completed, dtype=bool)
    for name, limit in limits_ms.items():
        is_good &= np.nan_to_num(table.latencies_s[name]) * 1e3 <= limit
    good = int(is_good.sum())
    share = good / table.num_requests if table.num_requests else None
    return {"slo_attainment": share, "request_goodput": _rate(good, table.end_s)}


def _statistics(table: LoadTable) -> dict[str, float | None]:
    values_s = {name: np.asarray(column) for name, column in table.latencies_s.items()}
    by_name = {name: summarise(values[~np.isnan(values)] * 1e3) for name, values in values_s.items()}
    by_name["itl"] = table.gaps.summarise_ms()
    return {
        f"{statistic}_{name}_ms": value
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic, value in by_name[name].items()
    }


def _peaks(table: LoadTable) -> dict[str, float | int | None]:
    """Most tokens in one second (counted from the first request), most requests under way at once."""
    num_completed = table.num_completed
    when_s = np.concatenate([np.asarray(table.finished_s), np.asarray(table.sent_s)])
    changes = np.repeat([-1, 1], num_completed)
    under_way = np.cumsum(changes[np.argsort(when_s, kind="stable")])  # at equal times an end counts first
    return {
        "max_output_tokens_per_s": table.max_tokens_per_s,
        "max_concurrent_requests": int(under_way.max(initial=0)),
    }


def _per_request(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return parallel lists, one entry per request; a failed one has output length 0 and an error, as in vLLM."""
    return {
        "request_ids": [record.request_id for record in records],
        "start_times": [record.sent_s for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [len(record.token_times_s) if record.error is None else 0 for record in records],
        "ttfts": [lifecycle.time_to_first_token_s(record.sent_s, record.token_times_s) or 0.0 for record in records],
        "itls": [lifecycle.inter_token_latencies_s(record.token_times_s) for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _engine(engine: EngineReport | None) -> dict[str, Any]:
    names = ("preemptions", "recomputed_tokens", "wasted_tokens", "swap", "steps", "scheduler_s")
    return asdict(engine) if engine else dict.fromkeys(names)


def _gaps(table: LoadTable) -> dict[str, Any]:
    e2e_s = np.asarray(table.latencies_s["e2el"])
    is_served = e2e_s > 0
    return {
        "max_token_gap_s": table.gaps.max_s,
        "fairness": {
            "jain_index": jain_index(np.asarray(table.num_tokens)[is_served] / e2e_s[is_served]),
            "max_wait_s": table.max_wait_s,
        },
    }


def jain_index(shares: Sequence[float] | Floats) -> float | None:
    """(sum x)^2 / (n * sum x^2): 1 when all are equal, 1/n when one has everything; None for no shares.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness", DEC-TR-301, 1984.
    """
    array = np.asarray(shares, dtype=np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares > 0 else None
