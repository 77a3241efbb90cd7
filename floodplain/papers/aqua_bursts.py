"""AQUA's bursts (figures 1, 8, 13): first come first served, fair turns over PCIe, fair turns over NVLink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.serving import ARXIV, SHAREGPT, Burst, Lengths, Served, capacity, scenario_of, serve_rows
from floodplain.sim.machine import resolve_machine

VLLM, CFS, AQUA, OWN = (
    "vLLM (FCFS)",
    "vLLM + CFS over PCIe",
    "AQUA (CFS over NVLink)",
    "Floodplain (timely over NVLink)",
)
NUM_SATURATING = 60
"""Requests that wait at once where the rate is measured that one engine completes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One experiment.

    Attributes:
        engine: The scenario without a policy.
        pcie: Bytes per second of a GPU's link to host memory, as the paper says.
        rented_pcie: The same as others measured it on a rented machine.
        nvlink: The link to the neighbour, by name.
        factor: The burst's rate over the stable rate.
        num_before, burst_s: Requests before the burst, and seconds that it lasts.
    """

    engine: Mapping[str, Any]
    pcie: float
    rented_pcie: float
    nvlink: str
    lengths: Lengths
    factor: float
    num_before: int = 25
    burst_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Guess:
    """The stable rate as a part of what one engine completes, and what else differs from the paper's words.

    ``model``: the model whose steps are taken, with the KV pool of the paper's.
    """

    share: float
    has_rented_pcie: bool = False
    model: str | None = None


UNKNOWN = Unknown(
    "stable rate",
    {f"{share:g} of capacity": Guess(share) for share in (0.6, 0.7, 0.8, 0.9, 1.0)}
    | {f"{share:g} of capacity, rented PCIe": Guess(share, has_rented_pcie=True) for share in (0.8, 1.0)},
    "0.8 of capacity",
)
COMMON = (
    "Prompts and outputs are log-normal by the medians and 90th percentiles of Sarathi-Serve's Table 2; arrivals are "
    "Poisson.",
    f"Capacity is what one engine completes under FCFS while {NUM_SATURATING} requests wait.",
    "Slices of CFS last 16 steps, and nothing computes while KV is copied. It takes turns only where a copy takes at "
    "most half of the time of computing.",
    "Copies have the link's full bandwidth. On rented machines others measured 12.3 GB/s (A100) and 25.7 GB/s (H100).",
    "Chunks of 512 tokens beside decodes, no prefix cache, steps planned one after the other (vLLM 0.5.3).",
    "When the burst ends no request arrives for as long as it takes the stable rate to bring the burst's requests.",
    "Floodplain's own way is its default policy with the same swap space, copies beside steps.",
)
A100 = Setting(
    engine={"model": "yi-34b-200k", "device": "a100-80gb"},
    pcie=25e9, rented_pcie=12.3e9, nvlink="nvlink3", lengths=SHAREGPT, factor=2.0,
)  # fmt: skip
H100 = Setting(
    engine={"model": "llama-3.1-70b", "device": "h100-80gb", "tensor_parallel": 2},
    pcie=50e9, rented_pcie=25.7e9, nvlink="nvlink4", lengths=SHAREGPT, factor=2.0,
)  # fmt: skip


UNKNOWN_H100 = replace(
    UNKNOWN,
    values=dict(UNKNOWN.values)
    | {f"{share:g} of capacity, steps of 2023": Guess(share, model="llama-2-70b") for share in (0.8, 1.0)},
)


def _ways(setting: Setting, guess: Guess) -> dict[str, dict[str, Any]]:
    base: dict[str, Any] = {"scheduling": "sync", "max_batched_tokens": 512, "prefix_cache": False}
    base |= {"kv_blocks": resolve_machine(scenario_of(dict(setting.engine) | {"engine": base})).num_blocks}
    changed = dict(setting.engine) | ({"model": guess.model} if guess.model else {})
    pcie = setting.rented_pcie if guess.has_rented_pcie else setting.pcie

    def scenario(policy: str, link: str | float | None, *, is_synchronous: bool = False) -> dict[str, Any]:
        engine = base | {"policy": policy, "synchronous_swap": is_synchronous}
        swap = {} if link is None else {"swap": {"memory": "40GB", "link": link}}
        return changed | {"engine": engine} | swap

    return {
        VLLM: scenario("fcfs", None),
        CFS: scenario("cfs", pcie, is_synchronous=True),
        AQUA: scenario("cfs", setting.nvlink, is_synchronous=True),
        OWN: scenario("timely", setting.nvlink),
    }


def measure_burst(setting: Setting, guess: Guess, seed: int) -> Measured:
    """Serve one burst in every way."""
    ways = _ways(setting, guess)
    drawn = setting.lengths.draw(NUM_SATURATING, np.random.default_rng(seed))
    rate = guess.share * capacity(ways[VLLM], drawn)
    pause_s = setting.factor * setting.burst_s
    burst = Burst(
        rate=rate, factor=setting.factor, pause_s=pause_s, num_before=setting.num_before, burst_s=setting.burst_s
    )
    rows = burst.rows(setting.lengths, seed)
    served = {name: serve_rows(scenario, rows) for name, scenario in ways.items()}
    return Measured(_quantities(served, burst), _picture(served))


def _quantities(served: Mapping[str, Served], burst: Burst) -> dict[str, float]:
    before, during = slice(0, burst.num_before), slice(burst.num_before, burst.num_before + burst.num_in_burst)
    peak_s = {name: max(each.ttft_s[during]) for name, each in served.items()}
    pace_s = {name: max(each.tpot_s[during]) for name, each in served.items()}
    done_s = {name: fmean(each.e2e_s[during]) for name, each in served.items()}
    calm_s = max(served[VLLM].tpot_s[before])
    slow = {name: sum(tpot > calm_s for tpot in each.tpot_s[burst.num_before :]) for name, each in served.items()}
    return {
        "fcfs_peak_s": peak_s[VLLM],
        "own_peak_s": peak_s[OWN],
        "fcfs_spike": peak_s[VLLM] / fmean(served[VLLM].ttft_s[before]),
        "own_spike": peak_s[OWN] / fmean(served[OWN].ttft_s[before]),
        "ttft_gain": peak_s[VLLM] / peak_s[AQUA],
        "own_ttft_gain": peak_s[VLLM] / peak_s[OWN],
        "tpot_gain": pace_s[CFS] / pace_s[AQUA],
        "own_tpot_gain": pace_s[CFS] / pace_s[OWN],
        "cfs_completion": done_s[CFS] / done_s[VLLM],
        "aqua_completion": done_s[AQUA] / done_s[VLLM],
        "own_completion": done_s[OWN] / done_s[VLLM],
        "cfs_slow": float(slow[CFS]),
        "aqua_slow": float(slow[AQUA]),
        "own_slow": float(slow[OWN]),
    }


def _picture(served: Mapping[str, Served]) -> Picture:
    def curves(read: Callable[[Served], tuple[float, ...]]) -> dict[str, Any]:
        return {name: (list(range(1, len(read(each)) + 1)), list(read(each))) for name, each in served.items()}

    return Picture(
        "request, in order of arrival",
        {
            "TTFT (s)": curves(lambda each: each.ttft_s),
            "TPOT (s)": curves(lambda each: each.tpot_s),
            "completion (s)": curves(lambda each: each.e2e_s),
        },
    )


FIGURE_1 = Figure(
    name="aqua-1",
    shows="Responsiveness and completion times in a burst of twice the stable rate",
    setting="Yi-34B on one A100 with 80 GB, ShareGPT; 25 requests, then twice the rate for a minute",
    statements=(
        Statement(
            "largest TTFT under vLLM in the burst, over its mean TTFT before", 4.0, "fcfs_spike", own="own_spike"
        ),
        Statement(
            "mean completion time in the burst under CFS over PCIe, relative to vLLM (section 1: more than 2x)",
            2.0,
            "cfs_completion",
            bound="at least",
            own="own_completion",
        ),
        Statement(
            "the same ratio as section 2.3 states it (about 50 % longer)", 1.5, "cfs_completion", own="own_completion"
        ),
    ),
    assumptions=("The paper does not name this figure's LLM: Yi-34B, as in its figure 13 on an A100.", *COMMON),
    measure=partial(measure_burst, A100),
    unknown=UNKNOWN,
)
FIGURE_8 = Figure(
    name="aqua-8",
    shows="TTFT and TPOT of each request in a burst of twice the stable rate",
    setting="Llama-3.1-70B on two H100 (tensor parallel), ShareGPT; 25 requests, then twice the rate for a minute",
    statements=(
        Statement("largest TTFT under vLLM in the burst", 20.0, "fcfs_peak_s", unit="s", own="own_peak_s"),
        Statement("largest TTFT under vLLM over that under AQUA", 20.0, "ttft_gain", own="own_ttft_gain"),
        Statement(
            "largest TPOT under CFS over PCIe, over that under AQUA (up to 1.5x)", 1.5, "tpot_gain", own="own_tpot_gain"
        ),
        Statement(
            "requests whose TPOT the burst raises, CFS over PCIe (25 to 48)",
            23.0,
            "cfs_slow",
            unit="requests",
            own="own_slow",
        ),
        Statement(
            "requests whose TPOT the burst raises, AQUA (25 to 40)", 15.0, "aqua_slow", unit="requests", own="own_slow"
        ),
    ),
    assumptions=(
        "A roofline of the H100 stands for its kernels, and sums over two GPUs are assumed. Steps of 2023 are those of "
        "Llama-2-70B on two H100, as splitwise-sim has them.",
        "TPOT counts as raised if it is above the largest of the 25 requests before the burst under vLLM.",
        *COMMON,
    ),
    measure=partial(measure_burst, H100),
    unknown=UNKNOWN_H100,
)
FIGURE_13 = Figure(
    name="aqua-13",
    shows="TTFT and TPOT of each long prompt in a burst of three times the stable rate",
    setting="Yi-34B on one A100 with 80 GB, arXiv summarization; 25 requests, then three times the rate for a minute",
    statements=(
        Statement("largest TTFT under vLLM over that under AQUA", 2.0, "ttft_gain", own="own_ttft_gain"),
        Statement("largest TPOT under CFS over PCIe, over that under AQUA", 2.0, "tpot_gain", own="own_tpot_gain"),
    ),
    assumptions=COMMON,
    measure=partial(measure_burst, replace(A100, lengths=ARXIV, factor=3.0)),
    unknown=UNKNOWN,
)
