"""The facts of a benchmark result beside its latencies: the run, the hardware, and the engine's counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes written to and read from one tier, backups included."""

    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """KV that swapping moved.

    Attributes:
        out_bytes: KV written at preemptions.
        in_bytes: KV swapped in.
        backup_bytes: KV backed up while its request still ran.
        stall_s: Time in which requests were live and nothing could run before a copy ended.
        by_tier: The traffic of each tier, by its name.
        failed_transfers: Incomplete copies, by problem; their KV was recomputed.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    backup_bytes: int = 0
    stall_s: float = 0.0
    by_tier: Mapping[str, TierTraffic] = field(default_factory=dict)
    failed_transfers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpansionReport:
    """The cost of streamed layers.

    Attributes:
        expansion: Blocks of the pool at the end, over those without streamed layers.
        streamed_layers: Layers that streamed at the end.
        in_bytes: KV loaded for steps.
        out_bytes: KV written to copies.
        stall_s: How long compute waited for loads.
        limited: Why the expansion was not larger at the end; None if it was as large as requested.
    """

    expansion: float = 1.0
    streamed_layers: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    stall_s: float = 0.0
    limited: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareReport:
    """The hardware of a run.

    Attributes:
        name: For example the GPU's; ``emulated-… on …`` when links are emulated.
        emulated: Whether any link is emulated.
        links: The links in use, each as a mapping of its facts: ``tier``, ``name``, ``emulated``, ``bandwidth`` (bytes
            per second of a large copy, slower direction); of an emulated one also ``modelled_bandwidth``,
            ``slowdown`` (their ratio, the same for all links) and ``source``.
    """

    name: str
    emulated: bool
    links: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The facts of a run that only the engine knows.

    Attributes:
        preemptions: Number of preemptions.
        recomputed_tokens: Tokens computed again because their KV was dropped.
        wasted_tokens: Tokens sampled for a sequence that had ended while the step ran.
        swap: KV that swapping moved.
        steps: Steps executed.
        scheduler_s: The loop's own time, planning and taking in results, over all steps.
        expansion: The cost of streamed layers.
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
    """The facts of a run, for the head of the result.

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
        hardware: The engine's hardware; None if unknown.
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
