"""Requests: windows of a sample of GPUs, simulated token by token, with lending and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from examples.simulate.planning.gpus import BORROWER, HERE, LENDER, Gpus
from floodplain.sim.prediction import predict
from floodplain.sim.scenario import make_scenario

Value = TypeVar("Value")
VARIANTS = {"no swap space": ("swap", "borrow", "lenders"), "host memory": ("borrow", "lenders"), "lent memory": ()}
"""What each variant of a window leaves out of the scenario."""


@dataclass(frozen=True, slots=True)
class Window:
    """A simulated stretch of one slot: a borrower and its lender at their loads.

    Attributes:
        rates: Of the borrower and the lender, over their models' means.
        kept: By variant: the share of the borrower's requests within their goals.
        lender_kept: The same of the lender's: without lending, and with it.
        needed_bytes: Of swap space that the borrower's requests need, each second, with lending.
        lender_load: (used blocks, waiting requests) of the lender alone, each second.
    """

    rates: tuple[float, float]
    num_requests: tuple[int, int]
    kept: Mapping[str, float]
    lender_kept: tuple[float, float]
    leases: Mapping[str, Any]
    needed_bytes: Sequence[int]
    lender_load: Sequence[tuple[int, int]]


def draw_sample(gpus: Gpus, num_strata: int, rng: np.random.Generator) -> list[tuple[str, int]]:
    """A (borrower, slot) of each stratum: all strata have equally many requests, and are ordered by load."""
    rates = gpus.rates[BORROWER]
    order = np.argsort(rates, axis=None, kind="stable")
    weights = rates.ravel()[order]
    strata = np.minimum(np.cumsum(weights) * num_strata / weights.sum(), num_strata - 1e-9).astype(int)
    drawn = []
    for stratum in range(num_strata):
        inside = order[strata == stratum]
        cell = int(rng.choice(inside, p=rates.ravel()[inside] / rates.ravel()[inside].sum()))
        drawn.append((gpus.names[BORROWER][cell // rates.shape[1]], cell % rates.shape[1]))
    return drawn


def simulate_window(content: Mapping[str, Any], rates: tuple[float, float], seconds: float, seed: int) -> Window:
    """All variants of one window, with equal requests."""
    pair = dict(content)
    chat = dict(pair["lenders"][LENDER])
    pair["workload"] = _load(pair["workload"], rates[0], seconds, 2 * seed)
    chat["workload"] = _load(chat["workload"], rates[1], seconds, 2 * seed + 1)
    pair["lenders"] = {LENDER: chat}
    results = {}
    for variant, absent in VARIANTS.items():
        parts = {key: value for key, value in pair.items() if key not in absent}
        results[variant] = predict(make_scenario(parts, variant, HERE)).result
    alone = predict(make_scenario({"device": pair["device"]} | chat, LENDER, HERE)).result
    facts = results["lent memory"]["floodplain"]["simulation"]
    timeline = alone["floodplain"]["timeline"]
    waiting = (a + b for a, b in zip(timeline["num_waiting"], timeline["num_swapped"], strict=True))
    return Window(
        rates=rates,
        num_requests=(pair["workload"]["num_prompts"], chat["workload"]["num_prompts"]),
        kept={variant: result["slo_attainment"] for variant, result in results.items()},
        lender_kept=(alone["slo_attainment"], facts["lenders"][LENDER]["slo_attainment"]),
        leases={key: facts["leases"][key] for key in ("leases", "bytes", "moved_to_host_bytes", "forced")},
        needed_bytes=_up_to(seconds, facts["leases"]["needed"]["t"], facts["leases"]["needed"]["bytes"]),
        lender_load=_up_to(seconds, timeline["time_s"], list(zip(timeline["kv_used_blocks"], waiting, strict=True))),
    )


def _load(workload: Mapping[str, Any], rate: float, seconds: float, seed: int) -> dict[str, Any]:
    per_s = max(workload["request_rate"] * rate, 1e-3)
    return dict(workload) | {"request_rate": per_s, "num_prompts": max(1, round(per_s * seconds)), "seed": seed}


def _up_to(seconds: float, times: Sequence[float], values: Sequence[Value]) -> list[Value]:
    """What is after the warm-up, a tenth, and before the last arrival; at least the last value."""
    return [v for t, v in zip(times, values, strict=True) if seconds / 10 <= t <= seconds] or list(values[-1:])
