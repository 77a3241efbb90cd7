"""KunServe's figures 2, 12 and 13: what a burst does to replicas whose KV memory runs out, under several ways."""

from __future__ import annotations

from statistics import median

from floodplain.core.quantiles import quantile
from floodplain.cost.model_shape import shape_named
from floodplain.papers.claims import Figure, Measured, Picture, Statement
from floodplain.papers.kunserve_bursts import (
    BURSTGPT_14B,
    COMMON,
    KUNSERVE,
    LOAD,
    LONGBENCH_14B,
    LONGBENCH_72B,
    OWN,
    OWN_WAY,
    PIPELINE,
    SWAP,
    VLLM,
    Load,
    Setting,
    late_share,
    over_time,
    pools_over_demand,
)

BURST_TOKENS = 243_000
"""Of one GPU in a burst, by the paper."""
SLO_SCALE = 10
"""Of LongBench: the longest TTFT, in medians of the best baseline."""


def _measure_2(load: Load, seed: int) -> Measured:
    rows, served = load.of(BURSTGPT_14B).serve((VLLM, SWAP, OWN), load.share, seed)
    spikes = {name: max(one.ttft_s) / median(one.ttft_s) for name, one in served.items()}
    token_bytes = shape_named(BURSTGPT_14B.place["model"]).kv_bytes_per_token()
    return Measured(
        {
            "burst_gib": BURST_TOKENS * token_bytes / 2**30,
            "pools_over_demand": pools_over_demand(served[VLLM]),
            "vllm": spikes[VLLM],
            "swap": spikes[SWAP],
            "own": spikes[OWN],
        },
        Picture("s", {"mean TTFT (s)": over_time(rows, served)}),
    )


FIGURE_2 = Figure(
    name="kunserve-2",
    shows="TTFT in a burst of chats whose KV does not fit",
    setting="Qwen2.5-14B on A800, BurstGPT",
    statements=(
        Statement("KV of 243K tokens", 45.0, "burst_gib", unit="GiB"),
        Statement("KV memory, relative to the mean demand", 2.1, "pools_over_demand"),
        Statement("vLLM: largest TTFT, relative to the median", 239.0, "vllm", own="own"),
        Statement("InferCept: largest TTFT, relative to the median", 92.0, "swap", own="own"),
    ),
    assumptions=(
        "One instance, whose requests are many; Floodplain's own way has no drops then.",
        *COMMON[1:],
        OWN_WAY,
    ),
    measure=_measure_2,
    unknown=LOAD,
)


def _measure_12(load: Load, seed: int) -> Measured:
    rows, served = load.of(LONGBENCH_14B).serve((VLLM, PIPELINE, KUNSERVE, OWN), load.share, seed)
    speeds = {name: float(one.result["output_throughput"]) for name, one in served.items()}
    worst = {name: quantile(one.ttft_s, 0.99) for name, one in served.items()}
    blocks = {name: one.result["floodplain"]["timeline"] for name, one in served.items()}
    used = {name: (line["time_s"], line["kv_used_blocks"]) for name, line in blocks.items()}
    return Measured(
        {
            "slower": 100 * (1 - speeds[PIPELINE] / speeds[VLLM]),
            "own_slower": 100 * (1 - speeds[OWN] / speeds[VLLM]),
            "pipeline_p99": worst[PIPELINE] / worst[KUNSERVE],
            "own_p99": worst[PIPELINE] / worst[OWN],
        },
        Picture("s", {"mean TTFT (s)": over_time(rows, served), "KV blocks held": used}),
    )


FIGURE_12 = Figure(
    name="kunserve-12",
    shows="TTFT and KV over time in a burst of long documents",
    setting="Qwen2.5-14B on A800, LongBench",
    statements=(
        Statement(
            "tokens/s of a static pipeline, below vLLM's (3.3 to 21.8 %)",
            3.3,
            "slower",
            unit="%",
            bound="at least",
            own="own_slower",
        ),
        Statement(
            "P99 TTFT of a static pipeline over KunServe's (12.7x to 72.2x over all baselines)",
            12.7,
            "pipeline_p99",
            bound="at least",
            own="own_p99",
        ),
    ),
    assumptions=(*COMMON, OWN_WAY),
    measure=_measure_12,
    unknown=LOAD,
)


def _compare(setting: Setting, load: Load, seed: int) -> dict[str, float]:
    _, served = load.of(setting).serve((VLLM, SWAP, KUNSERVE, OWN), load.share, seed)
    ttft = {name: quantile(one.ttft_s, 0.99) for name, one in served.items()}
    tpot = {name: quantile(one.tpot_s, 0.5) for name, one in served.items()}
    limit_s = SLO_SCALE * min(median(served[name].ttft_s) for name in (VLLM, SWAP))
    late = {name: late_share(one.ttft_s, limit_s) for name, one in served.items()}
    return {
        "vllm": ttft[VLLM] / ttft[KUNSERVE],
        "vllm_own": ttft[VLLM] / ttft[OWN],
        "swap": ttft[SWAP] / ttft[KUNSERVE],
        "swap_own": ttft[SWAP] / ttft[OWN],
        "tpot": 100 * (tpot[KUNSERVE] / tpot[VLLM] - 1),
        "tpot_own": 100 * (tpot[OWN] / tpot[VLLM] - 1),
        "late": late[VLLM] - late[KUNSERVE],
        "late_own": late[VLLM] - late[OWN],
        **{f"p99 of {name}": seconds for name, seconds in ttft.items()},
    }


def _measure_13(load: Load, seed: int) -> Measured:
    small, large = (_compare(setting, load, seed) for setting in (LONGBENCH_14B, LONGBENCH_72B))
    models = ("14B", "72B")
    bars = {name: (models, [each[f"p99 of {name}"] for each in (small, large)]) for name in (VLLM, SWAP, KUNSERVE, OWN)}
    return Measured(
        small | {f"{name}_72b": value for name, value in large.items()}, Picture("Qwen2.5", {"P99 TTFT (s)": bars})
    )


FIGURE_13 = Figure(
    name="kunserve-13",
    shows="Latencies in a burst of long documents: KunServe beside waiting and swapping",
    setting="Qwen2.5-14B on A800, and 72B on four H800 each, LongBench",
    statements=(
        Statement(
            "14B: vLLM's P99 TTFT over KunServe's (12.7x to 72.2x over all baselines)",
            12.7,
            "vllm",
            bound="at least",
            own="vllm_own",
        ),
        Statement(
            "14B: InferCept's P99 TTFT over KunServe's (the same)", 12.7, "swap", bound="at least", own="swap_own"
        ),
        Statement(
            "14B: KunServe's P50 TPOT above vLLM's (15.8 to 22.7 % over the baselines)",
            19.0,
            "tpot",
            unit="%",
            own="tpot_own",
        ),
        Statement(
            f"14B: requests with a TTFT above {SLO_SCALE} medians, fewer than vLLM's (by 7.2 to 12.8 points)",
            10.0,
            "late",
            unit="%",
            own="late_own",
        ),
        Statement(
            "72B: vLLM's P99 TTFT over KunServe's (8.4x to 11.9x over all baselines)",
            10.0,
            "vllm_72b",
            own="vllm_own_72b",
        ),
        Statement(
            "72B: KunServe's P50 TPOT above vLLM's (18.3 to 22.7 % over the baselines)",
            20.0,
            "tpot_72b",
            unit="%",
            own="tpot_own_72b",
        ),
    ),
    assumptions=(*COMMON, OWN_WAY),
    measure=_measure_13,
    unknown=LOAD,
)
