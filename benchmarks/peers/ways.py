"""What is compared: schedulers of other systems, and our plug-in, each as arguments of the same engine of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.vllm.virtual import Hardware

FCFS = "FCFS"
LONG_PREFILL_TOKENS = 256
CLASSES = {
    "gate": "benchmarks.peers.gate.GateScheduler",
    "SJF": "benchmarks.peers.shortest.ShortestScheduler",
    "VTC": "benchmarks.peers.vtc.VtcScheduler",
    "least computed": "benchmarks.peers.least_computed.LeastComputedScheduler",
    "UniBoost": "benchmarks.peers.uniboost.UniBoostScheduler",
    "TokenFlow": "benchmarks.peers.tokenflow.TokenFlowScheduler",
}
"""Schedulers for ``--scheduler-cls``, by the name of their way."""
FLAGS: Mapping[str, Mapping[str, Any]] = {
    FCFS: {},
    "priority": {"scheduling_policy": "priority"},
    "long prefill": {"long_prefill_token_threshold": LONG_PREFILL_TOKENS},
}
"""vLLM's own."""
SWAPS = ("TokenFlow",)
"""Peers that have our plug-in's swap space."""
PEERS = (*FLAGS, *CLASSES)
OURS = ("timely", "paced", "timely, no swap", "paced, no swap")
REAL = (FCFS, "priority", "gate", "SJF", "VTC", "TokenFlow", "timely")
"""Measured with a model and a clock on the wall, too: those with the most requests within their goals, and the gate."""


def tell_peer(hardware: Hardware, tpot_goal_s: float) -> dict[str, Any]:
    """Return what peers may know (``PeerScheduler.known``), as ``additional_config``."""
    line = hardware.line
    prices = {"base_s": line.base_s, "decode_s": line.decode_s, "prefill_token_s": line.prefill_token_s}
    return {"peer": {"tpot_goal_s": tpot_goal_s, **prices}}


def find_arguments(way: str, hardware: Hardware, goals_s: Sequence[float]) -> tuple[str, dict[str, Any]]:
    """Return a way of ``benchmarks.vllm.measure.make_engine``, and more arguments of ``LLM``."""
    if way in OURS:
        return way, {}
    if way in FLAGS:
        return "stock", dict(FLAGS[way])
    told = {"scheduler_cls": CLASSES[way], "additional_config": tell_peer(hardware, goals_s[1])}
    return "timely" if way in SWAPS else "stock", told
