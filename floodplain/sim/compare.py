"""Holds a simulation to a real run of vLLM: reads the run's folder, and computes the errors.

The folder has ``requests.jsonl`` (``input_toks``, ``output_toks``, ``arrival_time`` since the epoch; ``queued_ts``,
``first_token_ts`` and ``last_token_ts`` on another clock), ``meta.json`` (``model``, ``engine_kwargs``) and, if there
is one, ``timeseries.csv`` (``t``, ``running``, ``waiting``), as LLMServingSim's authors record them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from floodplain.core.errors import UserError
from floodplain.core.quantiles import quantile
from floodplain.files.parsing import read_json_object
from floodplain.sim.prediction import Prediction
from floodplain.workload.columns import read_csv, read_json_rows
from floodplain.workload.traces import TraceRow

STATISTICS = ("mean", "p50", "p90", "p99")
_ENGINE_KEYS = {
    "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_batched_tokens", "max_model_len": "max_model_len",
    "gpu_memory_utilization": "utilisation", "block_size": "block_tokens", "enable_prefix_caching": "prefix_cache",
}  # fmt: skip
"""Keys of ``engine_kwargs``, and of ``engine`` in a scenario."""
_DEVICE_NAMES = {
    "4090$": "rtx4090", "PRO 6000": "rtxpro6000", "A100.*40GB": "a100-40gb", "A100": "a100-80gb", "A800": "a800-80gb",
    "GH200": "gh200-96gb", "H100 80GB HBM3": "h100-80gb", "H800": "h800-80gb", "H200": "h200",
}  # fmt: skip
"""Patterns of the names that torch gives devices, and our names; the first that is found counts."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """A real run: its requests in order of arrival, their first and last token, and its settings as far as stated.

    Times are seconds since the first arrival. ``sets`` are keys of a scenario that the run's own settings give;
    ``kv_blocks`` is the pool for requests, None if the run does not tell it.
    """

    rows: list[TraceRow]
    first_s: list[float]
    last_s: list[float]
    series: dict[str, list[float]]
    sets: tuple[str, ...]
    kv_blocks: int | None


def read_run(folder: Path) -> RealRun:
    """The run in a folder. UserError, with file and line, if something is missing or no number."""
    path = folder / "requests.jsonl"
    requests = [_Request.of(where, row) for where, row in read_json_rows(path)]
    if not requests:
        raise UserError(f"{path} has no request")
    requests.sort(key=lambda each: each.arrival_s)
    start_s = requests[0].arrival_s
    offset_s = min(each.queued_s - each.arrival_s for each in requests) + start_s  # of the second clock
    meta = read_json_object(folder / "meta.json")
    for name in ("engine_kwargs", "hardware", "kv_cache"):
        if not isinstance(meta.get(name), dict | None):
            raise UserError(f"{folder / 'meta.json'}: {name} must be an object")
    return RealRun(
        rows=[TraceRow(each.arrival_s - start_s, each.num_prompt, each.num_output) for each in requests],
        first_s=[each.first_s - offset_s for each in requests],
        last_s=[each.last_s - offset_s for each in requests],
        series=_read_series(folder / "timeseries.csv"),
        sets=tuple(_sets_of(meta)),
        kv_blocks=_blocks_of(meta),
    )


def compare(run: RealRun, prediction: Prediction) -> dict[str, Any]:
    """Errors in per cent, simulated over real: each statistic of ``ttft``, ``tpot`` and ``e2e``, and ``makespan``.

    Also ``kv_blocks`` and mean absolute differences of running and waiting requests over time. None: not in a run.
    """
    lives = prediction.lifecycles
    simulated = _latencies(
        run.rows, [life.token_times_s[0] for life in lives], [life.token_times_s[-1] for life in lives]
    )
    real = _latencies(run.rows, run.first_s, run.last_s)
    errors: dict[str, Any] = {
        name: {statistic: _per_cent(_statistic(simulated[name], statistic), _statistic(real[name], statistic))
               for statistic in STATISTICS}
        for name in real
    }  # fmt: skip
    errors["makespan"] = _per_cent(max(life.token_times_s[-1] for life in lives), max(run.last_s))
    blocks = prediction.machine.num_blocks
    errors["kv_blocks"] = None if run.kv_blocks is None else _per_cent(blocks, run.kv_blocks)
    return errors | {"mean_difference": _differences(run, prediction)}


def error_table(errors: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the errors, for a terminal."""
    rows = [
        [name.upper(), *(show_error(errors[name][each]) for each in STATISTICS)] for name in ("ttft", "tpot", "e2e")
    ]
    return ["error (%)", *STATISTICS], rows


def show_error(per_cent: float | None) -> str:
    """An error with its sign and one decimal; ``-`` for None."""
    return "-" if per_cent is None else f"{per_cent:+.1f}"


@dataclass(frozen=True, slots=True)
class _Request:
    num_prompt: int
    num_output: int
    arrival_s: float
    queued_s: float
    first_s: float
    last_s: float

    @classmethod
    def of(cls, where: str, row: Mapping[str, Any]) -> _Request:
        names = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
        for name in names:
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{where}: {name} must be a number")
        prompt, output, *times = (row[name] for name in names)
        if not (isinstance(prompt, int) and isinstance(output, int) and prompt > 0 and output > 0):
            raise UserError(f"{where}: input_toks and output_toks must be whole numbers from 1 on")
        if row["first_token_ts"] > row["last_token_ts"]:
            raise UserError(f"{where}: first_token_ts must not be after last_token_ts")
        return cls(prompt, output, *times)


def _latencies(rows: Sequence[TraceRow], first_s: Sequence[float], last_s: Sequence[float]) -> dict[str, Any]:
    arrivals, first, last = np.array([row.arrival_s for row in rows]), np.array(first_s), np.array(last_s)
    tokens = np.array([row.output_tokens for row in rows])
    many = tokens > 1
    return {"ttft": first - arrivals, "tpot": (last - first)[many] / (tokens[many] - 1), "e2e": last - arrivals}


def _statistic(values: Any, name: str) -> float:
    if not len(values):
        return math.nan
    return float(np.mean(values) if name == "mean" else quantile(values.tolist(), int(name[1:]) / 100))


def _per_cent(simulated: float, real: float) -> float | None:
    return 100 * (simulated / real - 1) if real > 0 and math.isfinite(simulated) else None


def _differences(run: RealRun, prediction: Prediction) -> dict[str, float] | None:
    """Of running and waiting requests at the run's samples; a swapped request counts as waiting."""
    if not run.series:
        return None
    simulated: Any = prediction.result["floodplain"]
    columns = {name: np.array(values) for name, values in simulated["timeline"].items()}
    waiting = columns["num_waiting"] + columns["num_swapped"]
    found = {}
    for name, values in (("running", columns["num_running"]), ("waiting", waiting)):
        at = np.interp(run.series["t"], columns["time_s"], values)
        found[name] = float(np.abs(at - np.array(run.series[name])).mean())
    return found


def _read_series(path: Path) -> dict[str, list[float]]:
    if not path.exists():
        return {}
    header, lines = read_csv(path)
    rows = [row for _, row in lines]
    if missing := [name for name in ("t", "running", "waiting") if name not in header]:
        raise UserError(f"{path} has no column {', '.join(missing)}")
    try:
        return {name: [float(row[name]) for row in rows] for name in ("t", "running", "waiting")} if rows else {}
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _sets_of(meta: Mapping[str, Any]) -> list[str]:
    """Settings of a run as values of a scenario: model, device, and limits of the engine."""
    kwargs, hardware = {**(meta.get("kv_cache") or {}), **(meta.get("engine_kwargs") or {})}, meta.get("hardware") or {}
    found = ["engine.policy=fcfs", "engine.scheduling=async"]
    if isinstance(model := meta.get("model"), str):
        found.append(f"model={model.rpartition('/')[2].lower()}")
    name = str(hardware.get("device_name", ""))
    found += [f"device={ours}" for pattern, ours in _DEVICE_NAMES.items() if re.search(pattern, name)][:1]
    found += [f"engine.{ours}={kwargs[key]}" for key, ours in _ENGINE_KEYS.items() if kwargs.get(key) is not None]
    if isinstance(shards := kwargs.get("tensor_parallel_size"), int):
        found.append(f"tensor_parallel={shards}")
    return found


def _blocks_of(meta: Mapping[str, Any]) -> int | None:
    """vLLM's ``num_gpu_blocks`` without the null block, which no request gets."""
    blocks = (meta.get("kv_cache") or {}).get("num_gpu_blocks")
    return blocks - 1 if isinstance(blocks, int) and blocks > 1 else None
