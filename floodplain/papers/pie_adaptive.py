"""Pie's figure 9: adaptive expansion beside fixed ones, and the latency of a token in its parts."""

from __future__ import annotations

from dataclasses import replace
from operator import sub
from statistics import median

from floodplain.papers.claims import Figure, Measured, Picture, Statement
from floodplain.papers.pie_serving import COMMON, HOST, OWN, SHAREGPT, Case
from floodplain.papers.serving import Served

LATENCIES = (1.0, 1.4, 1.8, 2.0, 2.2, 2.6)
"""Expansions of Figure 9c, and one beyond them."""
TRANSPARENT = 0.01
"""Part of the time that compute may wait for copies at an expansion that does not show."""


def waits_of(served: Served) -> tuple[float, float]:
    """(queueing, compute): seconds for each output token off and on the device; preempted requests queue again."""
    columns, tokens = served.result["floodplain"]["residence"], served.result["total_output_tokens"]
    on_s = sum(end - begin for stays in columns["on_device_s"] for begin, end in stays)
    all_s = sum(map(sub, columns["finished_s"], columns["arrival_s"]))
    return (all_s - on_s) / tokens, on_s / tokens


def _stalled(served: Served) -> float:
    return float(served.result["floodplain"]["simulation"]["stream_stall_s"] / served.result["duration"])


def _speed(served: Served) -> float:
    return float(served.result["output_throughput"])


def _measure_9(host_ms: float, seed: int) -> Measured:
    case = Case("opt-13b", replace(SHAREGPT, num_requests=96), host_ms=host_ms)
    served = {factor: case.serve(factor, seed) for factor in LATENCIES}
    adaptive, own = case.serve("auto", seed), case.serve("auto", seed, link="c2c")
    blocks = adaptive.result["floodplain"]["timeline"]["kv_total_blocks"]
    waits, best = {factor: waits_of(one) for factor, one in served.items()}, max(map(_speed, served.values()))
    quantities = {
        "overhead": 100 * max(0.0, best / _speed(adaptive) - 1),
        "own_overhead": 100 * max(0.0, best / _speed(own) - 1),
        "settled": median(blocks[len(blocks) // 2 :]) / blocks[0],
        "transparent": max(factor for factor, one in served.items() if _stalled(one) <= TRANSPARENT),
        "queueing": waits[2.0][0] / waits[1.0][0],
        "compute": waits[2.0][1] / waits[1.0][1],
    }
    panels = {
        "tokens/s": {
            "fixed": (LATENCIES, [*map(_speed, served.values())]),
            "adaptive": (LATENCIES, [_speed(adaptive)] * len(LATENCIES)),
        },
        "ms per token": {
            "queueing": (LATENCIES, [1e3 * queueing_s for queueing_s, _ in waits.values()]),
            "compute": (LATENCIES, [1e3 * compute_s for _, compute_s in waits.values()]),
        },
    }
    return Measured(quantities, Picture("expansion", panels))


FIGURE_9 = Figure(
    name="pie-9",
    shows="Adaptive expansion beside fixed ones: throughput, and latency per token in its parts",
    setting="OPT-13B on one GH200, ShareGPT, KV pool of 3 GB",
    statements=(
        Statement(
            "tokens/s of the best fixed expansion, above those of the adaptive one (less than 2 %)",
            2.0,
            "overhead",
            unit="%",
            bound="at most",
            own="own_overhead",
        ),
        Statement("expansion at which the adaptive one settles", 2.08, "settled", fitted="model and pool"),
        Statement("largest fixed expansion whose copies do not show (2.0; at 2.2 they do)", 2.0, "transparent"),
        Statement("compute latency at expansion 2, relative to none (nearly constant)", 1.0, "compute"),
        Statement("queueing latency at expansion 2, relative to none (lower)", 1.0, "queueing", bound="at most"),
    ),
    assumptions=(
        "The paper names neither model nor pool here: OPT-13B and 3 GB, which fit the expansion of 2.08.",
        "Adaptive is Floodplain's controller, not Pie's search; the best fixed one is that of the expansions drawn.",
        f"Copies do not show if compute waits for them in at most {100 * TRANSPARENT:g} % of the time.",
        *COMMON,
        OWN,
    ),
    measure=_measure_9,
    unknown=HOST,
)
