"""Outputs of an engine: outputs with vLLM's field names, streamed deltas, and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import PromptLogprobs, TokenLogprobs

ERROR = "error"
"""The reason of a request's end for which the model computed NaN or infinity."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text and tokens of a request since the last delta.

    Attributes:
        text: May be empty (half a character, or text that may become a stop string).
        token_ids: At least one unless the request ends by a stop string or an abort.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` in the last delta, else None.
        logprobs: One entry for each of ``token_ids`` if the request asked for them.
        num_cached_tokens: Prompt tokens that were not computed: found on the device, or fetched from swap space.
        prompt_logprobs: Of the prompt, in the first delta, if the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion, with vLLM's field names."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, with vLLM's field names; ``lifecycle`` holds its times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    lifecycle: Lifecycle | None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ExpansionFacts:
    """State and counters of an engine's expansion: its blocks over those without streamed layers.

    Attributes:
        loaded_bytes: KV loaded onto the device for steps, since the start; ``near_loaded_bytes`` of it from neighbours'
            copies of ``num_near`` layers.
        written_bytes: KV written to layers' copies; ``near_written_bytes``: to those of neighbours.
        block_bytes: Device memory of a block; 0: as much as in swap space.
        limited: Why the expansion is not larger; None while it is not limited.
    """

    expansion: float = 1.0
    num_streamed: int = 0
    loaded_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0
    host_bytes: int = 0
    num_near: int = 0
    near_loaded_bytes: int = 0
    near_written_bytes: int = 0
    block_bytes: int = 0
    limited: str | None = None


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """Seconds in which steps of a pipeline were outstanding, and those in which each stage computed, by number."""

    active_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)

    def with_step(self, busy_s: Sequence[float], active_s: float) -> PipelineFacts:
        """Add a step: the time that each stage computed for it, and more time with outstanding steps."""
        total_s = {str(stage): self.busy_s.get(str(stage), 0.0) + one for stage, one in enumerate(busy_s)}
        return PipelineFacts(self.active_s + active_s, total_s)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of gauges and counters since start; the source of ``/metrics`` and of timelines.

    ``kv_blocks`` counts blocks by state name; ``kv_bytes`` is the memory of the pool (``local``) and of the slots that
    live requests need (other tiers), ``cached_bytes`` that of slots with idle backups, ``pinned_bytes`` the part of
    these that is pinned for sessions, ``swap_capacity_bytes`` that of all slots. ``swap_bytes`` counts bytes over links
    by (``out`` or ``in``, tier), ``backup_bytes`` those written ahead of need. ``swap_stall_s`` is the time in which
    requests were live and nothing could run before a copy ended, ``scheduler_s`` the loop's own. ``failed_transfers``
    counts copies by problem, ``limited_steps`` steps by the reason that limited their decision (``core.plan.LIMITS``).
    ``lease_bytes`` are lent (``producer``) or borrowed (``consumer``) by (role, the other end); ``recall_times_s`` has
    the seconds of the last of ``num_recalls``; ``num_failed_growths`` counts failures to map bytes that should be free,
    ``borrowed_leases`` leases by outcome (``lending.neighbours.LeaseFacts``), ``failed_exchanges`` those with the
    coordinator by problem. In ``pipeline_s`` steps of a pipeline were outstanding; in ``stage_busy_s`` of it each stage
    computed. ``session_returns`` counts requests that continue a session whose KV was ``pinned`` or ``unpinned``,
    ``unpinned_blocks`` blocks that ``expired`` or were ``evicted``. Of ``num_queried_tokens`` looked up in the prefix
    cache ``num_cached_tokens`` were found. ``block_tokens`` is 0 while there is no engine.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_blocks: dict[str, int] = field(default_factory=dict)
    kv_bytes: dict[str, int] = field(default_factory=dict)
    cached_bytes: dict[str, int] = field(default_factory=dict)
    pinned_bytes: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_steps: int = 0
    scheduler_s: float = 0.0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    num_wasted_tokens: int = 0
    num_requests: dict[str, int] = field(default_factory=dict)
    swap_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    backup_bytes: int = 0
    swap_stall_s: float = 0.0
    failed_transfers: dict[str, int] = field(default_factory=dict)
    limited_steps: dict[str, int] = field(default_factory=dict)
    lease_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    num_recalls: int = 0
    recall_times_s: tuple[float, ...] = ()
    num_failed_growths: int = 0
    borrowed_leases: dict[str, int] = field(default_factory=dict)
    failed_exchanges: dict[str, int] = field(default_factory=dict)
    expansion: ExpansionFacts = ExpansionFacts()
    stage_busy_s: dict[str, float] = field(default_factory=dict)
    pipeline_s: float = 0.0
    session_returns: dict[str, int] = field(default_factory=dict)
    unpinned_blocks: dict[str, int] = field(default_factory=dict)
    swap_capacity_bytes: dict[str, int] = field(default_factory=dict)
    block_tokens: int = 0

    @property
    def kv_utilization(self) -> float:
        """Used blocks over all blocks, from 0 to 1; 0 without blocks."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
