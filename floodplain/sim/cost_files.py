"""Reads the cost of steps from files: tables of kernels, and step profiles."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from floodplain.core.errors import UserError
from floodplain.cost.kernels import KernelCost, Line, graph_sizes
from floodplain.cost.model_shape import ModelShape
from floodplain.cost.step_time import StepCost, read_cost
from floodplain.files.profile import read_profile
from floodplain.workload.columns import read_csv

_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def read_kernels(folder: Path, shape: ModelShape, all_reduce: Line, overhead_s: float, max_num_seqs: int) -> KernelCost:
    """The cost by the tables in a folder, with the columns of LLMServingSim's profiler, times in microseconds.

    Of a mixture of experts ``moe.csv`` is read, too. Tokens are padded as under the graphs that vLLM captures for
    ``max_num_seqs``. ``all_reduce``: seconds of a sum over the GPUs by the number of tokens; empty for one GPU.
    UserError, with the file, if a table cannot be read or lacks something.
    """
    attention = {}
    for row in _rows(folder / "attention.csv", (*_AXES, "time_us")):
        chunk, before, count, context = (_count(folder / "attention.csv", row[name]) for name in _AXES)
        attention[chunk, before, count, context] = _seconds(folder / "attention.csv", row["time_us"])
    dense: dict[str, Line] = dict(_read_lines(folder / "dense.csv", "tokens"))
    if all_reduce:
        dense["all_reduce"] = all_reduce
    if shape.num_experts:
        dense["moe"] = _read_experts(folder / "moe.csv", shape)
    try:
        return KernelCost(
            shape.num_layers,
            dense,
            attention,
            _read_lines(folder / "per_sequence.csv", "sequences"),
            overhead_s=overhead_s,
            graphs=graph_sizes(max_num_seqs),
        )
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def _read_experts(path: Path, shape: ModelShape) -> Line:
    """Seconds of a layer's experts by number of tokens, at the number of experts that these activate."""
    times: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for row in _rows(path, ("tokens", "activated_experts", "time_us")):
        times[_count(path, row["tokens"])][_count(path, row["activated_experts"])] = _seconds(path, row["time_us"])
    return {
        tokens: float(np.interp(shape.count_active_experts(tokens), sorted(line), [line[n] for n in sorted(line)]))
        for tokens, line in times.items()
    }


def read_steps(path: Path, overhead_s: float) -> tuple[StepCost, str]:
    """The cost that ``floodplain profile step`` fitted, and what was measured. UserError if the file is none."""
    profile = read_profile(path, "step")
    cost = read_cost(profile.result)
    return replace(cost, base_s=cost.base_s + overhead_s), f"{profile.subject} on {profile.machine}"


def _read_lines(path: Path, axis: str) -> dict[str, dict[int, float]]:
    """Seconds by size, of each kernel."""
    lines: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in _rows(path, ("layer", axis, "time_us")):
        lines[row["layer"]][_count(path, row[axis])] = _seconds(path, row["time_us"])
    return dict(lines)


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    header, rows = read_csv(path)
    if missing := [name for name in columns if name not in header]:
        raise UserError(f"{path} has no column {', '.join(missing)}")
    return [row for _, row in rows]


def _count(path: Path, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{path}: {text!r:.40} is no whole number")
    return int(text)


def _seconds(path: Path, text: str) -> float:
    try:
        microseconds = float(text)
    except ValueError:
        microseconds = -1.0
    if not 0 < microseconds < 1e9:
        raise UserError(f"{path}: {text!r:.40} is no time in microseconds")
    return microseconds * 1e-6
