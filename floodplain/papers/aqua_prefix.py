"""AQUA's figure 9a: a cached prompt of 100 thousand tokens, loaded from swap space for each request that shares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from floodplain.core.plan import StepPlan
from floodplain.core.tiers import Link, Tier
from floodplain.cost.link import LINKS
from floodplain.cost.step_time import StepTimer
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.serving import SHAREGPT, poisson_rows, scenario_of, serve_rows
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.sim.load import Load
from floodplain.sim.machine import loop_config, resolve_machine
from floodplain.sim.scenario import Scenario
from floodplain.sim.serving import VirtualDevice, serve
from floodplain.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceRow

NUM_STEADY, EVERY = 30, 10
"""Requests after the prompt is cached, and every which one shares it."""
SUFFIX, BLOCK_TOKENS, CHUNK = 256, 16, 512
SHARED_BLOCKS = (100_000 - SUFFIX) // MOONCAKE_BLOCK_TOKENS
SHARED = SHARED_BLOCKS * MOONCAKE_BLOCK_TOKENS
START_S = 60.0
"""When the steady requests begin: the first prompt is then cached."""
RATE = 0.5
ENGINE: dict[str, Any] = {"policy": "fcfs", "scheduling": "sync", "max_batched_tokens": CHUNK}
SCENARIO: dict[str, Any] = {"model": "yi-34b-200k", "device": "h100-80gb", "tensor_parallel": 2, "engine": ENGINE}
DRAM, AQUA, OWN = "from DRAM", "AQUA (over NVLink)", "Floodplain (stays on the device)"


def make_rows(seed: int) -> list[TraceRow]:
    """The first prompt, and the steady requests, of which every ``EVERY``-th has its prefix."""
    steady = poisson_rows(SHAREGPT, RATE, NUM_STEADY, seed, START_S)
    ids = tuple(range(1, SHARED_BLOCKS + 1))
    shared = TraceRow(0.0, SHARED + SUFFIX, 100, ids)
    rows = [
        replace(shared, arrival_s=row.arrival_s) if number % EVERY == EVERY // 2 else row
        for number, row in enumerate(steady)
    ]
    return [shared, *rows]


def measure_prefix(bandwidth: float, seed: int) -> Measured:
    """Serve the requests with a load at each hit, for which all others wait, and as Floodplain serves them."""
    rows, scenario = make_rows(seed), scenario_of(SCENARIO)
    prefix_bytes = SHARED // BLOCK_TOKENS * resolve_machine(scenario).block_bytes
    nvlink_s = LINKS["nvlink4"].inbound.time_s(prefix_bytes)
    own = serve_rows(SCENARIO | {"engine": ENGINE | {"policy": "timely"}}, rows)
    ttft_s: dict[str, Sequence[float]] = {
        DRAM: serve_blocking(scenario, rows, prefix_bytes / bandwidth),
        AQUA: serve_blocking(scenario, rows, nvlink_s),
        OWN: own.ttft_s,
    }
    hits = [number for number, row in enumerate(rows) if row.prefix_ids][1:]
    peak_s = {name: max(times[hit] for hit in hits) for name, times in ttft_s.items()}
    numbers = list(range(1, len(rows)))
    return Measured(
        {
            "first_s": ttft_s[DRAM][0],
            "dram_s": peak_s[DRAM],
            "gain": peak_s[DRAM] / peak_s[AQUA],
            "own_s": peak_s[OWN],
            "own_gain": peak_s[DRAM] / peak_s[OWN],
        },
        Picture(
            "request, in order of arrival",
            {"TTFT (s)": {name: (numbers, list(times[1:])) for name, times in ttft_s.items()}},
        ),
    )


def serve_blocking(scenario: Scenario, rows: Sequence[TraceRow], load_s: float) -> list[float]:
    """TTFT of each request if the step that begins a hit takes ``load_s`` longer."""
    machine = resolve_machine(scenario)
    device = VirtualDevice(
        step_time_s=_with_loads(StepTimer(machine.cost).time_s, load_s),
        num_blocks=machine.num_blocks,
        block_tokens=BLOCK_TOKENS,
        config=loop_config(scenario, machine),
        link=Link(Tier.HOST, 1e9),
        num_swap_slots=0,
    )
    lives = serve(Load(scenario, rows), FcfsPolicy(), device).lifecycles
    return [life.token_times_s[0] - life.arrival_s for life in lives]


def _with_loads(time_s: Callable[[StepPlan], float], load_s: float) -> Callable[[StepPlan], float]:
    """``time_s``, and ``load_s`` more for each request whose first chunk begins behind a prefix."""
    begun: set[int] = set()

    def longer_s(plan: StepPlan) -> float:
        hits = [chunk for chunk in plan.prefills if chunk.seq_id not in begun and chunk.start]
        begun.update(chunk.seq_id for chunk in plan.prefills)
        return time_s(plan) + load_s * len(hits)

    return longer_s


FIGURE_9A = Figure(
    name="aqua-9a",
    shows="TTFT where every tenth request has a cached prefix of 100 thousand tokens in swap space",
    setting="Yi-34B-200K on two H100 (tensor parallel), ShareGPT beside; the prefix is loaded at each hit",
    statements=(
        Statement("TTFT of the first such prompt, which is computed", 10.0, "first_s", unit="s"),
        Statement("largest TTFT of a hit, loaded from DRAM", 4.0, "dram_s", unit="s", own="own_s"),
        Statement("largest TTFT of a hit from DRAM over that under AQUA", 3.5, "gain", own="own_gain"),
    ),
    assumptions=(
        "A roofline of the H100 stands for its kernels. Chunks of 512 tokens, arrivals are Poisson at 0.5 requests/s.",
        "Every request of the batch waits for a load, as the paper says. Each GPU loads its half of the heads.",
        "AQUA's loads are gathered into one copy at 396 GB/s, as nvbandwidth measures NVLink 4.",
        "16 KiB are the keys of one block in one layer on one GPU; 10 us a copy are assumed.",
        "Floodplain's own way (timely): the prefix fits into what 160 GB leave beside the weights, so it stays there.",
    ),
    measure=measure_prefix,
    unknown=Unknown(
        "bandwidth from DRAM",
        {
            "50 GB/s": 50e9,
            "25.7 GB/s (a rented machine)": 25.7e9,
            "1.6 GB/s (copies of 16 KiB)": 2**14 / 10.3e-6,
        },
        "50 GB/s",
    ),
)
