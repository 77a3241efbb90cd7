"""KunServe's figures 5 and 17: what a pipeline costs where memory suffices, and a burst that does not end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from floodplain.core.quantiles import quantile
from floodplain.papers.claims import Figure, Measured, Picture, Statement, Unknown
from floodplain.papers.kunserve_bursts import (
    COMMON,
    KUNSERVE,
    LONGBENCH_14B,
    LONGBENCH_72B,
    OWN,
    OWN_WAY,
    VLLM,
    over_time,
)
from floodplain.papers.serving import Served, serve_rows
from floodplain.workload.traces import TraceRow

DEPTHS = (1, 2, 4)
"""Instances in a group: none of the layers dropped, half, and three quarters."""
BURST_S, ENDLESS_S = 60.0, 150.0
"""When the burst begins, and for how long it is watched."""
SLO_SCALE, WINDOW_S = 5, 10.0


def _measure_5(share: float, seed: int) -> Measured:
    setting = replace(LONGBENCH_14B, num_instances=max(DEPTHS), phases=((60.0, 1.0),))
    rows = setting.rows(setting.rate(share), seed)
    reliefs = [setting.relief(mode="pipeline", most_stages=depth) if depth > 1 else None for depth in DEPTHS]
    served = [serve_rows(setting.scenario(relief=relief), rows) for relief in reliefs]
    latency_s, tpot_s = [fmean(one.e2e_s) for one in served], [fmean(one.tpot_s) for one in served]
    dropped = [100 * (1 - 1 / depth) for depth in DEPTHS]
    return Measured(
        {
            "rises": float(sum(later > earlier for earlier, later in pairwise(latency_s))),
            "half": latency_s[1] / latency_s[0],
            "most": latency_s[2] / latency_s[0],
        },
        Picture(
            "% of the layers dropped",
            {"latency (s)": {"mean": (dropped, latency_s)}, "TPOT (s)": {"mean": (dropped, tpot_s)}},
        ),
    )


FIGURE_5 = Figure(
    name="kunserve-5",
    shows="Latency by the part of the layers that each instance drops",
    setting="Qwen2.5-14B on A800, LongBench; memory suffices everywhere",
    statements=(
        Statement(
            "times that the mean latency rises from none dropped to half to three quarters (the more, the higher)",
            2.0,
            "rises",
            unit="times",
            bound="at least",
        ),
    ),
    assumptions=(
        "The paper's text has no numbers of this figure. Four instances serve alone, in two groups of two, or in one "
        "of four, with microbatches of equal cost.",
        "Floodplain's own way has the same pipelines.",
        *COMMON[2:4],
    ),
    measure=_measure_5,
    unknown=Unknown(
        "load",
        {f"{share:g} of the rate that fills memory": share for share in (0.3, 0.6)},
        "0.6 of the rate that fills memory",
    ),
)


def stands_s(rows: Sequence[TraceRow], served: Served) -> float:
    """Seconds of the burst until the mean TTFT of a window is late; all of it if none is."""
    before = [ttft_s for row, ttft_s in zip(rows, served.ttft_s, strict=True) if row.arrival_s < BURST_S]
    places, means = over_time(rows, {"": served}, WINDOW_S)[""]
    late = (
        place + WINDOW_S - BURST_S
        for place, mean_s in zip(places, means, strict=True)
        if place >= BURST_S and mean_s > SLO_SCALE * median(before)
    )
    return next(late, ENDLESS_S)


def _measure_17(share: float, seed: int) -> Measured:
    setting = replace(LONGBENCH_72B, phases=((BURST_S, 1.0), (ENDLESS_S, 2.0)))
    rows, served = setting.serve((VLLM, KUNSERVE, OWN), share, seed)
    stands = {name: stands_s(rows, one) for name, one in served.items()}
    blocks = served[KUNSERVE].result["floodplain"]["timeline"]["kv_total_blocks"]
    until_s = BURST_S + stands[KUNSERVE]
    meanwhile = [ttft_s for row, ttft_s in zip(rows, served[VLLM].ttft_s, strict=True) if row.arrival_s <= until_s]
    return Measured(
        {
            "longer": stands[KUNSERVE] / stands[VLLM],
            "own_longer": stands[OWN] / stands[VLLM],
            "freed": 100 * (max(blocks) / blocks[0] - 1),
            "spike": max(meanwhile) / quantile(meanwhile, 0.5),
        },
        Picture("s", {"mean TTFT (s)": over_time(rows, served)}),
    )


FIGURE_17 = Figure(
    name="kunserve-17",
    shows="A burst that does not end: how long requests are served in time",
    setting="Qwen2.5-72B on four H800 for each instance",
    statements=(
        Statement(
            "seconds of the burst until requests are late, KunServe's over vLLM's", 1.5, "longer", own="own_longer"
        ),
        Statement("KV memory that drops add", 57.0, "freed", unit="%"),
        Statement("vLLM's largest TTFT in that time, relative to the median (up to 42x)", 42.0, "spike"),
    ),
    assumptions=(
        f"Late is a mean TTFT in ten seconds above {SLO_SCALE} medians of those before the burst, which lasts "
        f"{ENDLESS_S:g} s here, and has twice the rate.",
        "Lengths are those of LongBench; the paper's figure has those of BurstGPT.",
        *COMMON[1:],
        OWN_WAY,
    ),
    measure=_measure_17,
    unknown=Unknown(
        "load before the burst",
        {f"{share:g} of the rate that fills memory": share for share in (0.7, 0.8, 0.9)},
        "0.8 of the rate that fills memory",
    ),
)
