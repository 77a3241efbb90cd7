"""What a benchmark result says beside its latencies: what was run, where, and what the engine counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes that went to and came from one tier, what was written ahead included."""

    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """What swapping moved.

    Attributes:
        out_bytes: KV written at preemptions.
        in_bytes: KV brought back.
        backup_bytes: KV written ahead, while its owner still ran.
        stall_s: How long requests were alive and nothing could run before a copy ended.
        by_tier: The traffic of each tier, by its name.
        failed_transfers: Copies that were not whole, by problem; what they moved was computed again.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    backup_bytes: int = 0
    stall_s: float = 0.0
    by_tier: Mapping[str, TierTraffic] = field(default_factory=dict)
    failed_transfers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionReport:
    """What layers that stream cost.

    Attributes:
        expansion: How many times as many blocks the pool had at the end as if no layer streamed.
        streamed_layers: Layers that streamed at the end.
        in_bytes: KV that was loaded for steps.
        out_bytes: KV that was written to copies.
        stall_s: How long compute waited for loads.
        limited: Why the expansion was not more at the end; None if it was as large as asked.
    """

    expansion: float = 1.0
    streamed_layers: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    stall_s: float = 0.0
    limited: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareReport:
    """Where it ran.

    Attributes:
        name: For example the GPU's; ``emulated-… on …`` when links are emulated.
        emulated: Whether any part is.
        links: The links in use, each as a mapping of its facts: ``tier``, ``name``, ``emulated``, ``bandwidth`` (bytes
            per second of a large copy, slower direction); of an emulated one also ``modelled_bandwidth``,
            ``slowdown`` (their ratio, the same for all links) and ``source``.
    """

    name: str
    emulated: bool
    links: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What only the engine knows of a run.

    Attributes:
        preemptions: How often a sequence was taken off the device.
        recomputed_tokens: Tokens computed again because their KV was dropped.
        wasted_tokens: Tokens sampled for a sequence that had ended while the step ran.
        swap: What swapping moved.
        steps: Steps executed.
        scheduler_s: The loop's own time, planning and taking in results, over all steps.
        expansion: What layers that stream cost.
    """

    preemptions: int
    recomputed_tokens: int
    wasted_tokens: int
    steps: int
    scheduler_s: float
    swap: SwapReport = field(default_factory=SwapReport)
    expansion: ExpansionReport = field(default_factory=ExpansionReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What was run, for the head of the result.

    Attributes:
        backend: ``floodplain`` (in process) or ``openai`` (over HTTP).
        model_id: The model's name.
        tokenizer_id: The tokenizer's name.
        request_rate: As asked; infinity when all were sent at once; None for a trace.
        burstiness: As asked.
        max_concurrency: As asked; None: open loop.
        seed: Of the workload.
        skipped_rows: Rows of the trace's file that could not be replayed; None without a trace.
        config: The resolved configuration.
        goodput: The limits of a good request, ``ttft:MS …``: as asked, or measured (``workload.goals``).
        hardware: Where the engine ran; None if unknown.
    """

    backend: str
    model_id: str
    tokenizer_id: str
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    skipped_rows: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    goodput: tuple[str, ...] = ()
    hardware: HardwareReport | None = None
