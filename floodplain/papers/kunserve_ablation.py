"""KunServe's figures 14 and 16: what drops, microbatches and restores are worth, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from floodplain.core.quantiles import quantile
from floodplain.papers.claims import Figure, Measured, Picture, Statement
from floodplain.papers.kunserve_bursts import (
    COMMON,
    KUNSERVE,
    LOAD,
    LONGBENCH_14B,
    OWN,
    OWN_WAY,
    VLLM,
    Load,
    over_time,
)
from floodplain.papers.serving import Served, serve_rows

DROP, LOOKAHEAD, KEPT = "drop, equal tokens", "drop, look-ahead", "never restored"
CALM_S, CALM = 90.0, 0.4
"""Seconds after each of two bursts, and their rate relative to that before."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def _ttft(served: Served, name: str) -> float:
    return quantile(served.ttft_s, QUANTILES[name])


def _tpot(served: Served, name: str) -> float:
    return quantile(served.tpot_s, QUANTILES[name])


def _bubbles(served: Served) -> float:
    """Per cent of a group's time; 0 if layers were never dropped."""
    return 100 * float(served.result["floodplain"]["simulation"]["relief"]["bubbles"] or 0.0)


def _measure_14(load: Load, seed: int) -> Measured:
    setting = load.of(LONGBENCH_14B)
    ways: Mapping[str, Any] = {
        VLLM: setting.ways()[VLLM],
        DROP: setting.scenario(relief=setting.relief(split="tokens")),
        LOOKAHEAD: setting.ways()[KUNSERVE],
        OWN: setting.ways()[OWN],
    }
    rows = setting.rows(setting.rate(load.share), seed)
    served = {name: serve_rows(way, rows) for name, way in ways.items()}
    vllm, drop, look, own = served.values()
    gains = {name: _ttft(vllm, name) / _ttft(drop, name) for name in QUANTILES}
    return Measured(
        gains
        | {f"own_{name}": _ttft(vllm, name) / _ttft(own, name) for name in QUANTILES}
        | {
            "slower": 100 * (_tpot(drop, "p50") / _tpot(vllm, "p50") - 1),
            "look_p90": 100 * (1 - _tpot(look, "p90") / _tpot(drop, "p90")),
            "look_p99": 100 * (1 - _tpot(look, "p99") / _tpot(drop, "p99")),
            "bubbles": _bubbles(drop),
            "look_bubbles": _bubbles(look),
            "own_bubbles": _bubbles(own),
        },
        Picture(
            "TTFT",
            {
                "seconds": {
                    name: (list(QUANTILES), [_ttft(one, each) for each in QUANTILES]) for name, one in served.items()
                }
            },
        ),
    )


FIGURE_14 = Figure(
    name="kunserve-14",
    shows="What dropped layers and the look-ahead of microbatches are worth, one after the other",
    setting="Qwen2.5-14B on A800, LongBench",
    statements=(
        Statement("drop: P90 TTFT, vLLM's over KunServe's", 8.8, "p90", own="own_p90"),
        Statement("drop: P99 TTFT, vLLM's over KunServe's", 11.7, "p99", own="own_p99"),
        Statement("drop: P99.9 TTFT, vLLM's over KunServe's", 10.3, "p999", own="own_p999"),
        Statement("drop: TPOT above vLLM's (21 to 31.9 %)", 26.0, "slower", unit="%"),
        Statement("look-ahead: P90 TPOT, lower by", 4.5, "look_p90", unit="%"),
        Statement("look-ahead: P99 TPOT, lower by", 10.6, "look_p99", unit="%"),
        Statement("bubbles with microbatches of equal tokens", 21.9, "bubbles", unit="%", own="own_bubbles"),
        Statement("bubbles with the look-ahead", 8.3, "look_bubbles", unit="%", own="own_bubbles"),
    ),
    assumptions=(
        "What coordinated exchange is worth (P99 TTFT 1.5x) is not simulated: activations and KV do not share a link.",
        "Bubbles are the part of a group's time with steps outstanding in which a stage computes nothing.",
        *COMMON,
        OWN_WAY,
    ),
    measure=_measure_14,
    unknown=LOAD,
)


def _measure_16(load: Load, seed: int) -> Measured:
    setting = load.of(LONGBENCH_14B)
    before, burst, _ = setting.phases
    setting = replace(setting, phases=(before, burst, (CALM_S, CALM), burst, (CALM_S, CALM)))
    ways = {
        KUNSERVE: setting.ways()[KUNSERVE],
        KEPT: setting.scenario(relief=setting.relief(split="halving", restore=False)),
    }
    rows = setting.rows(setting.rate(load.share), seed)
    served = {name: serve_rows(way, rows) for name, way in ways.items()}
    restored, kept = served.values()
    return Measured(
        {
            "ttft": 100 * (1 - _ttft(restored, "p50") / _ttft(kept, "p50")),
            "tpot": 100 * (1 - _tpot(restored, "p50") / _tpot(kept, "p50")),
            "ttft_p99": _ttft(kept, "p99") / _ttft(restored, "p99"),
            "tpot_p99": _tpot(kept, "p99") / _tpot(restored, "p99"),
        },
        Picture("s", {"mean TTFT (s)": over_time(rows, served)}),
    )


FIGURE_16 = Figure(
    name="kunserve-16",
    shows="What restoring layers is worth between two bursts",
    setting="Qwen2.5-14B on A800, two bursts",
    statements=(
        Statement("P50 TTFT, lower with restores by", 28.0, "ttft", unit="%"),
        Statement("P50 TPOT, lower with restores by", 23.0, "tpot", unit="%"),
        Statement("P99 TTFT, without restores over that with them", 6.4, "ttft_p99"),
        Statement("P99 TPOT, without restores over that with them", 1.2, "tpot_p99"),
    ),
    assumptions=(
        f"After each burst, {CALM:g} of the load before lasts for {CALM_S:g} s. Lengths are those of LongBench, not "
        "BurstGPT.",
        *COMMON,
    ),
    measure=_measure_16,
    unknown=LOAD,
)
