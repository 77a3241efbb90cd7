"""AQUA-PROFILER for consumers (AQUA, sections 4.1 and 9.4): the swap space that bursts, prefixes and contexts need.

Bursts are served in virtual time with a swap space that cannot run out. The result is its peak use since the burst
began: backups that preempted requests need, and those that the policy wrote ahead for requests on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from floodplain.core.errors import UserError
from floodplain.core.quantiles import quantile
from floodplain.core.request import Request
from floodplain.cost.step_time import LINE_PARTS, StepCost, read_cost
from floodplain.engine.config import EngineConfig
from floodplain.files.profile import Profile, read_profile
from floodplain.model.weights.open_model import open_model
from floodplain.observe.profile import PAPER_MODEL, PAPER_SWAP_GB
from floodplain.profiler.flags import SwapProfileConfig
from floodplain.profiler.targets import Load
from floodplain.profiler.virtual import VirtualServer, servable, to_request
from floodplain.runtime.state import LoopState
from floodplain.sim.serving import Peaks, Served
from floodplain.workload.arrivals import Phase, in_phases
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.spec import WorkloadSpec

NUM_BEFORE = 25
"""Requests at the stable rate before a burst, as in AQUA, section 9.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """The bursts to try: multiples of a rate that the model keeps up with, ``num_tries`` of each from ``seed`` on.

    After a burst the stable rate follows for as long.
    """

    stable_rate: float
    factors: tuple[float, ...]
    seconds: float
    num_tries: int
    seed: int

    def phases(self, factor: float) -> tuple[Phase, ...]:
        """The phases before, during and after the burst."""
        rate = self.stable_rate
        return Phase(NUM_BEFORE / rate, rate), Phase(self.seconds, factor * rate), Phase(self.seconds, rate)


class BurstServer(VirtualServer):
    """Serves bursts, which decide when requests arrive."""

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one KV block."""
        return self._device.config.block_bytes

    def bytes_of(self, num_prompts: int, num_tokens: int) -> int:
        """The KV bytes of so many prompts of at most so many tokens, in whole blocks."""
        return num_prompts * -(-num_tokens // self._device.block_tokens) * self.block_bytes

    def try_burst(self, bursts: Bursts, factor: float, seed: int) -> dict[str, Any]:
        """Serve one burst, and return its row of the profile. UserError if none of its requests can be served."""
        asked = burst_requests(self._load, self._tokenizer, bursts.phases(factor), seed)
        requests, error = servable(asked, self._device)
        if not requests:
            raise UserError(f"all {len(asked)} requests of a burst are refused: {error}")
        begin_s, peaks = bursts.phases(factor)[0].duration_s, Peaks()

        def note(state: LoopState, now: float) -> None:
            if now >= begin_s:
                peaks.note(state)

        lengths = [len(one.prompt_token_ids) + (one.params.max_tokens or 0) for one in requests]
        num_slots = sum(-(-length // self._device.block_tokens) for length in lengths)  # for all KV there will ever be
        served = self._serve(requests, note, num_swap_slots=num_slots)
        return {
            "factor": factor,
            "seed": seed,
            "needs_bytes": peaks.swap_slots * self.block_bytes,
            "swapped_bytes": peaks.swapped_blocks * self.block_bytes,
            "peak_kv_bytes": peaks.pool_blocks * self.block_bytes,
            "requests": len(requests),
            "refused": len(asked) - len(requests),
            "preempted": served.counters.preemptions["swap"],
            "ttft_p99_s": _ttft_p99_s(served),
        }


def profile_swap(
    server: BurstServer,
    bursts: Bursts,
    chosen: float,
    *,
    cached: tuple[int, int],
    long: tuple[int, int],
    subject: str,
    machine: str,
    settings: dict[str, Any],
    on_try: Callable[[], object] = lambda: None,
) -> Profile:
    """Try all bursts, and return the profile: swap space is needed for the ``chosen`` one, prefixes and contexts.

    ``cached`` and ``long`` are (prompts, tokens of the longest): to keep as prefixes, and of contexts that do not fit
    the device. ``machine`` is the one whose steps the cost describes.
    """
    rows = []
    for factor in bursts.factors:
        for number in range(bursts.num_tries):
            rows.append(_beside_paper(server.try_burst(bursts, factor, bursts.seed + number), subject))
            on_try()
    needs = {factor: [row["needs_bytes"] for row in rows if row["factor"] == factor] for factor in bursts.factors}
    parts = {
        "burst_bytes": max(needs[chosen]),
        "cached_bytes": server.bytes_of(*cached),
        "long_bytes": server.bytes_of(*long),
    }
    return Profile(
        kind="swap",
        subject=subject,
        machine=machine,
        is_virtual=True,
        settings=settings,
        result={
            "stable_rate_rps": bursts.stable_rate,
            "needs_bytes": sum(parts.values()),
            "burst_factor": chosen,
            **parts,
            "bursts": {f"{factor:g}x_bytes": max(found) for factor, found in needs.items()},
        },
        tries=rows,
        errors={"least_bytes": min(needs[chosen]), "most_bytes": max(needs[chosen])},
    )


def burst_requests(load: Load, tokenizer: PromptTokenizer, phases: tuple[Phase, ...], seed: int) -> list[Request]:
    """Requests of a load that arrive at the phases' rates until the last one ends. UserError if they are too many."""
    count = math.ceil(sum(phase.duration_s * phase.rate for phase in phases))
    asked = load.make(tokenizer, 1.0, seed, count)
    arrivals_s = in_phases(np.array([one.arrival_s for one in asked]), phases)
    return [replace(to_request(one), arrival_s=float(when)) for one, when in zip(asked, arrivals_s, strict=True)]


def _beside_paper(row: dict[str, Any], subject: str) -> dict[str, Any]:
    """The row, with what AQUA's authors measured for the same burst if the model is theirs."""
    if PAPER_MODEL not in subject.lower() or row["factor"] not in PAPER_SWAP_GB:
        return row
    return {**row, "paper_bytes": round(1e9 * PAPER_SWAP_GB[row["factor"]])}


def _ttft_p99_s(served: Served) -> float:
    times = [life.ttft_s for life in served.lifecycles if life.ttft_s is not None]
    return quantile(times, 0.99) if times else 0.0


def run_profile(config: SwapProfileConfig, engine: EngineConfig, spec: WorkloadSpec, *, progress: bool) -> Profile:
    """Profile what the flags describe. Raises UserError if a flag or a file is bad."""
    cost, machine = _cost(config)
    bursts = Bursts(
        stable_rate=_stable_rate(config, spec),
        factors=tuple(sorted(set(config.bursts))),
        seconds=config.burst_seconds,
        num_tries=config.tries,
        seed=spec.seed,
    )
    load = Load.read(spec)
    server = BurstServer(engine, open_model(engine.model, engine.seed), cost, load)
    with tqdm(total=len(bursts.factors) * bursts.num_tries, desc="bursts", disable=not progress) as bar:
        return profile_swap(
            server,
            bursts,
            config.burst,
            cached=(config.cached_prompts, config.cached_tokens),
            long=(config.long_contexts, config.long_tokens),
            subject=engine.model,
            machine=machine,
            settings=asdict(config) | {"engine": asdict(engine), "workload": asdict(spec)},
            on_try=bar.update,
        )


def _cost(config: SwapProfileConfig) -> tuple[StepCost, str]:
    if config.steps is None:
        return read_cost(dict(zip(LINE_PARTS, config.step_line, strict=True))), "a machine that was described"
    measured = read_profile(config.steps, "step")
    return read_cost(measured.result), measured.machine


def _stable_rate(config: SwapProfileConfig, spec: WorkloadSpec) -> float:
    if config.llm_profile is None:
        return spec.request_rate
    rate = float(read_profile(config.llm_profile, "llm").result["rate_rps"])
    if not rate:
        raise UserError(f"{config.llm_profile} found no rate within its goals: give --request-rate")
    return rate
