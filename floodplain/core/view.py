"""The input of policies: frozen rows and counts, never the loop's own objects.

A view is immutable but incremental: a row is replaced only when it changed. A token in every step is not a change: a
decoding row says *from which step on* it needs a block or has nothing to run, so it serves for a whole block of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.hashing import BlockKey
from floodplain.core.request import NO_GOALS, Goals, OrderKey, SeqId
from floodplain.core.sequence import Status
from floodplain.core.tiers import Tier

_Row = TypeVar("_Row")


@dataclass_transform(frozen_default=True)
def _as_row(cls: type[_Row]) -> type[_Row]:
    """A dataclass that is frozen for type checkers only.

    Freezing at run time costs an ``object.__setattr__`` for each of 25 fields (CPython 3.11: 4.5 µs instead of 1.0).
    """
    return dataclass(slots=True)(cls)


@_as_row
class SequenceView:
    """One sequence.

    Attributes:
        order_key: (priority, arrival, id): breaks every tie.
        since_step: The step index at which the counts below held. While ``is_decoding`` one token is scheduled, and one
            expected, in every step from then on.
        num_tokens: Known and expected tokens, at ``since_step``.
        num_scheduled: Leading tokens with KV on the device, outstanding steps included, at ``since_step``.
        num_blocks: Blocks that it holds; loading: including those that its copy fills.
        exclusive_blocks: Blocks that preempting it makes available.
        is_decoding: Each step schedules one token that the executor already holds.
        block_due_step: Decoding: the first step that needs one more block.
        end_step: Decoding: the first step with nothing to run, because its last token is already scheduled.
        num_cached_tokens: Waiting or swapped: tokens whose blocks are on the device by content and need no copy.
        num_shared_blocks: Of these blocks, those that cost no available block, since others hold them.
        num_backed_blocks: Running or loading: blocks with a backup, so that a swap-out copies at most ``num_blocks``
            less these. Waiting or swapped: blocks that a swap-in copies.
        num_restorable_tokens: Waiting or swapped: leading tokens that can be restored without computing.
        entered_step: Running: the step in which it last entered the device.
        last_token_s: Time of its last token when this row was made; a decoding row gets one in every step since.
        credit: Served work that its request was credited at arrival (``core.served``).
        parent: Names its request: choices of one request have the same.
        num_ended_tokens: Output tokens of choices of its request that have ended.
        is_leaving: Outbound copies of its blocks are in flight, so ``num_restorable_tokens`` may still grow.
        next_copy: Waiting or swapped: the first content that a swap-in copies. Requests with the same one can share the
            blocks of the first copy.
        is_arriving: Another sequence's inbound copy of that content is in flight.
        loses_kv: Running: its KV cannot be restored, so a preemption loses it.
    """

    seq_id: SeqId
    status: Status
    order_key: OrderKey
    client: str
    num_prompt: int
    since_step: int
    num_tokens: int
    num_scheduled: int
    num_blocks: int
    exclusive_blocks: int
    is_decoding: bool
    block_due_step: int
    end_step: int
    num_cached_tokens: int
    num_shared_blocks: int
    num_backed_blocks: int
    num_restorable_tokens: int
    entered_step: int
    last_token_s: float | None
    credit: float
    parent: SeqId
    num_ended_tokens: int
    is_leaving: bool
    goals: Goals = NO_GOALS
    first_token_s: float | None = None
    next_copy: BlockKey | None = None
    is_arriving: bool = False
    loses_kv: bool = False

    @property
    def num_remaining(self) -> int:
        """Tokens of its prompt (or, after a preemption, of all its tokens) left to schedule; not for decoding rows."""
        return self.num_tokens - self.num_scheduled

    def num_generated(self, step: int) -> int:
        """Tokens generated or on the way when step ``step`` is planned."""
        grown = step - self.since_step if self.is_decoding else 0
        return self.num_tokens + grown - self.num_prompt


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of swap space, and the prices of its link.

    Attributes:
        num_free_slots: Slots of one block each that a copy can take: free ones, and those of idle backups.
        block_s: Seconds that one block of a large copy takes on its link.
        latency_s: Seconds before the first byte.
        num_outbound_blocks: Blocks of outbound copies in flight; ``num_inbound_blocks`` likewise.
    """

    tier: Tier
    num_free_slots: int
    num_slots: int
    block_s: float
    latency_s: float
    num_outbound_blocks: int = 0
    num_inbound_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of computing on this device, learned from steps; a price is 0 while it is unknown.

    Attributes:
        step_s: Seconds of a recent step that only decodes.
        prefill_token_s: Seconds that one token of a prompt adds to a step.
        prompt_share: The part of the device's time that prompts take, by recently ended requests.
        lone_step_s: Seconds of a step with one decode; copies beside recent steps are in it.
        unloaded_step_s: The same, learned only from steps beside which no copy ran.
    """

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    prompt_share: float = 0.0
    lone_step_s: float = 0.0
    unloaded_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Recent demand, learned by the loop; a field is 0 while it is unknown.

    Attributes:
        mean_output: Tokens of an answer.
        median_prompt: Tokens of a prompt.
        end_rate: Requests that end per second while not all fit.
        longest_wait_s: Longest wait that FCFS would have imposed since the queue was last empty.
        step_s: Seconds of a step, prompts included.
    """

    mean_output: float = 0.0
    median_prompt: float = 0.0
    end_rate: float = 0.0
    longest_wait_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """All inputs of a decision, beside the time and the random generator.

    Attributes:
        running: Sequences on the device; these, ``swapped`` and ``loading`` are in order of their keys.
        waiting: The first waiting sequences in the policy's order, and the newest others, as many as it asks for.
        outstanding: Sequences in steps that are not complete: they cannot be preempted now.
        num_available_blocks: Blocks that can be allocated, by eviction of cached prefixes at need.
        num_empty_blocks: Available blocks that hold no cached prefix.
        num_blocks: Blocks of the pool, those that will return to it included: any request fits into so many.
        groups: Of layers with block tables of their own; empty if all layers share one.
        tiers: Swap space, nearest first.
        key_credits: For each API key with live requests: its lift, and the work of its requests that have ended.
        num_draining_blocks: Blocks that will be available when the copies that read them have ended.
        completion_step: The first step that was planned after the last request ended, if one has; else -1.
        depth: The most outstanding steps, this one included.
        outstanding_chunks: (first position, tokens) of each prompt's chunk in outstanding steps.
    """

    step: int
    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]
    num_waiting: int
    swapped: tuple[SequenceView, ...]
    loading: tuple[SequenceView, ...]
    outstanding: frozenset[SeqId]
    num_available_blocks: int
    num_blocks: int
    block_tokens: int
    max_batched_tokens: int
    max_num_seqs: int
    tiers: tuple[TierView, ...] = ()
    prices: Prices = Prices()
    num_draining_blocks: int = 0
    num_empty_blocks: int = 0
    key_credits: Mapping[str, float] = field(default_factory=dict)
    completion_step: int = -1
    depth: int = 1
    outstanding_chunks: tuple[tuple[int, int], ...] = ()
    demand: Demand = Demand()
    groups: tuple[CacheGroup, ...] = ()
