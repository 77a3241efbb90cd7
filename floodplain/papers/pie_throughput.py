"""Pie's figures 6 to 8: throughput by expansion, by the size of the KV pool, and by request rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.pie_serving import ALPACA, AT_ONCE, COMMON, HOST, OWN, SAME, SHAREGPT, Case


def _measure_6(host_ms: float, seed: int) -> Measured:
    cases = {
        name: replace(case, host_ms=host_ms)
        for name, case in (
            ("opt30_sharegpt", Case("opt-30b", SHAREGPT)),
            ("opt30_alpaca", Case("opt-30b", ALPACA)),
            ("opt13_sharegpt", Case("opt-13b", SHAREGPT)),
            ("opt13_large", Case("opt-13b", SHAREGPT, 7.0)),
            ("llama_alpaca", Case("llama-13b", ALPACA)),
        )
    }
    gains = {name: case.gains(seed) for name, case in cases.items()}
    best = {name: max(gain, key=lambda factor: gain[factor]) for name, gain in gains.items()}
    own = {f"{name}_own": case.own_tokens_per_s(seed) / case.tokens_per_s(1.0, seed) for name, case in cases.items()}
    return Measured(
        own
        | {name: max(gain.values()) for name, gain in gains.items()}
        | {"opt13_turn": best["opt13_sharegpt"], "opt13_large_turn": best["opt13_large"]}
        | {"saved": cases["opt13_sharegpt"].saved(seed)},
        Picture(
            "expansion",
            {
                "tokens/s, relative": {
                    cases[name].name: (list(gain), list(gain.values())) for name, gain in gains.items()
                }
            },
        ),
    )


def _gain(model: str, dataset: str, paper: float, quantity: str) -> Statement:
    text = f"{model} on {dataset}: tokens/s at the best expansion, relative to none"
    return Statement(text, paper, quantity, own=f"{quantity}_own")


FIGURE_6 = Figure(
    name="pie-6",
    shows="Throughput by expansion, for several models, loads and KV pools",
    setting="OPT-13B, OPT-30B and Llama-13B on one GH200, KV pools of 3 and 7 GB, ShareGPT and Alpaca",
    statements=(
        _gain("OPT-30B", "ShareGPT", 1.86, "opt30_sharegpt"),
        _gain("OPT-30B", "Alpaca", 1.58, "opt30_alpaca"),
        _gain("OPT-13B", "ShareGPT", 1.54, "opt13_sharegpt"),
        _gain("Llama-13B", "Alpaca", 1.27, "llama_alpaca"),
        Statement("OPT-13B on ShareGPT, 3 GB: best expansion tried (throughput rises up to 2)", 2.0, "opt13_turn"),
        Statement("the same with 7 GB: best expansion (1.4 to 1.6)", 1.5, "opt13_large_turn"),
        Statement("largest expansion that is as fast as a pool of that size", 1.67, "saved", bound="at least"),
    ),
    assumptions=(
        "The paper names no pool for the gains: 3 GB, as in its Figure 8.",
        f"All requests wait from the start. As fast is at least {SAME:g} of the larger pool's tokens per second "
        "(OPT-13B, ShareGPT).",
        *COMMON,
        OWN,
    ),
    measure=_measure_6,
    unknown=HOST,
)

ARRIVING = {"sharegpt": replace(SHAREGPT, num_requests=120), "alpaca": replace(ALPACA, num_requests=800)}
"""Datasets where requests arrive one after the other."""
POOLS_GB = (3.0, 6.0, 12.0)


def _measure_7(share: float, seed: int) -> Measured:
    quantities, panels = dict[str, float](), dict[str, Any]()
    for name, dataset in ARRIVING.items():
        cases = [Case("opt-13b", dataset, pool_gb) for pool_gb in POOLS_GB]
        rate = share * len(dataset.rows(AT_ONCE, seed)) / float(cases[-1].serve(1.0, seed).result["duration"])
        vllm, pie = ([case.tokens_per_s(factor, seed, rate) for case in cases] for factor in (1.0, "auto"))
        gains = [ours / base for ours, base in zip(pie, vllm, strict=True)]
        own = cases[0].own_tokens_per_s(seed, rate)
        quantities |= {name: max(gains), f"{name}_large": gains[-1], f"{name}_own": own / vllm[0]}
        panels[f"{dataset.name}: tokens/s"] = {"vLLM": (POOLS_GB, vllm), "Pie": (POOLS_GB, pie)}
    return Measured(quantities, Picture("KV pool (GB)", panels))


FIGURE_7 = Figure(
    name="pie-7",
    shows="Throughput of Pie and vLLM by the size of the KV pool, at one request rate",
    setting="OPT-13B on one GH200, KV pools of 3 to 12 GB; at 12 GB, vLLM serves all requests",
    statements=(
        Statement("ShareGPT: largest gain over vLLM", 1.9, "sharegpt", own="sharegpt_own"),
        Statement("Alpaca: largest gain over vLLM", 1.5, "alpaca", own="alpaca_own"),
        Statement("ShareGPT: gain with 12 GB (similar)", 1.0, "sharegpt_large"),
        Statement("Alpaca: gain with 12 GB (similar)", 1.0, "alpaca_large"),
    ),
    assumptions=("The paper names no model here: OPT-13B.", "Pie's expansion is our controller's.", *COMMON, OWN),
    measure=_measure_7,
    unknown=Unknown(
        "request rate",
        {f"{share:g} of what 12 GB complete": share for share in (0.5, 0.9)},
        "0.9 of what 12 GB complete",
    ),
)

RATES = {"sharegpt": (1.0, 3.0, 5.0), "alpaca": (15.0, 35.0)}
"""Requests per second."""
LOW_RATES = {"sharegpt": 3.0, "alpaca": 15.0}
"""Below which the paper sees little effect."""


def _measure_8(length_scale: float, seed: int) -> Measured:
    quantities, panels = dict[str, float](), dict[str, Any]()
    for name, dataset in ARRIVING.items():
        case = Case("opt-30b", dataset.scaled(length_scale))
        rates, high = RATES[name], RATES[name][-1]
        speeds = {factor: [case.tokens_per_s(factor, seed, rate) for rate in rates] for factor in (1.0, 2.0)}
        gains = dict(
            zip(rates, (ours / base for ours, base in zip(speeds[2.0], speeds[1.0], strict=True)), strict=True)
        )
        own = case.own_tokens_per_s(seed, high) / speeds[1.0][-1]
        quantities |= {name: gains[high], f"{name}_low": gains[LOW_RATES[name]], f"{name}_own": own}
        panels[f"{dataset.name}: tokens/s"] = {
            f"expansion {factor:g}": (rates, line) for factor, line in speeds.items()
        }
    return Measured(quantities, Picture("requests/s", panels))


FIGURE_8 = Figure(
    name="pie-8",
    shows="Throughput by request rate at several expansions",
    setting="OPT-30B on one GH200, KV pool of 3 GB",
    statements=(
        Statement("ShareGPT: gain where memory is short (1.6 to 1.9)", 1.9, "sharegpt", own="sharegpt_own"),
        Statement("Alpaca: gain where memory is short (1.2 to 1.6)", 1.6, "alpaca", own="alpaca_own"),
        Statement("ShareGPT: gain at 3 requests/s (little effect)", 1.0, "sharegpt_low"),
        Statement("Alpaca: gain at 15 requests/s (little effect)", 1.0, "alpaca_low"),
    ),
    assumptions=(
        f"Memory is short at {RATES['sharegpt'][-1]:g} requests/s of ShareGPT and {RATES['alpaca'][-1]:g} of Alpaca; "
        "the gain is that of expansion 2.",
        *COMMON,
        OWN,
    ),
    measure=_measure_8,
    unknown=Unknown("lengths", {"as stated": 1.0, "half as long": 0.5}, "as stated"),
)
