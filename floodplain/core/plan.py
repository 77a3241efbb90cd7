"""Messages of the step loop: a policy's decision (sequences), an executor's plan (blocks), and its result."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from floodplain.core.free_blocks import BlockId
from floodplain.core.ranges import Length, LogProbability, TokenId
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.tiers import Direction, Location, Tier


class Reason(Enum):
    """Why a policy decided so; the same words in the engine, the simulator and the metrics."""

    POOL_EXHAUSTED = "pool_exhausted"
    """A running sequence needed a block, and none was available."""
    SLICE_ENDED = "slice_ended"
    """Its slice is over, and an absent request ranks above it."""
    SLICE_BEGINS = "slice_begins"
    """It is resumed for a slice, by its rank."""
    PREFIX_IN_SWAP = "prefix_in_swap"
    """Swap space has a prefix of the prompt, and fetching it is faster than computing it."""
    CROWDED = "crowded"
    """Newcomers wait, because turns have become rare."""
    PROMISED = "promised"
    """Requests wait, because the device is claimed by requests that have begun, or the line is tight."""
    PROMPT_BOUND = "prompt_bound"
    """Newcomers wait, because prompts are so large a part of the work that first tokens first does not pay."""
    LINK_BUSY = "link_busy"
    """Slices are longer than configured, because copies could not keep up with shorter ones."""
    SWAP_SLOW = "swap_slow"
    """Recomputing is cheaper than a swap-in. Of a whole decision: no turns are taken, or a victim lost its KV so."""
    SWAP_FULL = "swap_full"
    """Swap space cannot take more."""
    NO_SWAP = "no_swap"
    """There is no swap space, or too little for the policy, so no turns are taken."""


LIMITS = (
    Reason.CROWDED, Reason.PROMISED, Reason.PROMPT_BOUND, Reason.LINK_BUSY, Reason.SWAP_SLOW, Reason.SWAP_FULL,
    Reason.NO_SWAP,
)  # fmt: skip
"""Reasons of a whole decision: limits that kept the policy from deciding as it would like."""


class PreemptionMode(Enum):
    """Whether the KV of a preempted sequence is dropped or swapped out."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run ``num_tokens`` not yet computed tokens of a sequence in this step."""

    seq_id: SeqId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """Take a sequence off the device; with SWAP, its blocks without a backup are copied to ``tier``."""

    seq_id: SeqId
    mode: PreemptionMode
    reason: Reason
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class Resumption:
    """Swap in the KV of a swapped sequence, or the prefix of a waiting one."""

    seq_id: SeqId
    reason: Reason


@dataclass(frozen=True, slots=True)
class BackupOrder:
    """Back up to ``num_blocks`` more full blocks of a running sequence in ``tier``."""

    seq_id: SeqId
    num_blocks: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class PrefixBackupOrder:
    """Back up, in ``tier``, up to ``num_blocks`` of the next ``num_at_risk`` evicted cached blocks without a backup."""

    num_at_risk: int
    num_blocks: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of a policy.

    The loop first applies what frees or takes blocks: preemptions, the prefix hits of admissions, resumptions, backups
    and the prefix backup; then it plans decodes, chunks, and the first chunks of admissions.

    Attributes:
        decodes: Running, decoding sequences that get one more token, in the order of the view.
        admissions: Waiting sequences that start, with their first chunk, in which a prefix hit does not count.
        backups: Running sequences whose full blocks are backed up.
        reason: Why the policy could not decide as it would like; None if it could.
    """

    preemptions: tuple[Preemption, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    decodes: tuple[SeqId, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Chunk, ...] = ()
    backups: tuple[BackupOrder, ...] = ()
    prefix_backup: PrefixBackupOrder | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute KV of ``token_ids`` at positions ``start`` and on; if ``samples``, sample the token that follows.

    ``request`` stands in the first chunk after a sequence is admitted and is None in the others.
    """

    seq_id: SeqId
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The block table of a sequence from entry ``start`` on."""

    seq_id: SeqId
    start: int
    blocks: tuple[BlockId, ...]


class TransferKind(Enum):
    """The purpose of a copy, which implies its direction."""

    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    BACKUP = "backup"

    @property
    def direction(self) -> Direction:
        """INBOUND for a swap-in, else OUTBOUND."""
        return Direction.INBOUND if self is TransferKind.SWAP_IN else Direction.OUTBOUND


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy these blocks between the KV pool and a tier; answered by ``loop.transfer_done``.

    SWAP_IN reads the locations, the other kinds write them; blocks and locations form pairs. ``seq_id`` is None for
    cached prefixes that no request uses.
    """

    transfer_id: int
    kind: TransferKind
    seq_id: SeqId | None
    blocks: tuple[BlockId, ...]
    locations: tuple[Location, ...]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Relocation:
    """Copy slots of one tier to slots of another, pair by pair; answered by ``loop.relocations.settle``."""

    relocation_id: int
    sources: tuple[Location, ...]
    targets: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, for an executor: first apply ``released`` and ``tables``, start ``transfers``, then run the batch.

    Attributes:
        step_id: Steps are completed in this order.
        decodes: Sequences that get one token; the executor holds their last token and position. The same tuple object
            as in the last plan when nothing changed.
        transfers: Copies that begin now. Swap-outs and backups read blocks that this step does not write.
        preemptions: For records; executors do not need them.
        released: Ended sequences, whose state the executor drops.
    """

    step_id: int
    decodes: tuple[SeqId, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    released: tuple[SeqId, ...] = ()

    @property
    def sampled(self) -> tuple[SeqId, ...]:
        """The sequences that get a token, in the order of ``StepResult.token_ids``."""
        return self.decodes + tuple(chunk.seq_id for chunk in self.prefills if chunk.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.prefills)

    def count_work(self) -> tuple[int, int]:
        """(decodes, prompt tokens); a chunk of one token, with which a swapped-in sequence resumes, is a decode."""
        sizes = [len(chunk.token_ids) for chunk in self.prefills]
        num_single = sizes.count(1)
        return len(self.decodes) + num_single, sum(sizes) - num_single


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run: plan again after a step or a copy has ended, or a request has arrived."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, and the likeliest alternatives in order.

    ``rank`` is how many tokens are at least as likely as a prompt's token, itself included; 0 for generated ones.
    """

    chosen: LogProbability
    top: Annotated[tuple[tuple[TokenId, LogProbability], ...], Length(64)] = ()
    rank: int = 0


PromptLogprobs = tuple[TokenLogprobs, ...]
"""Of each token of a prompt but the first, in order. Empty if a part of the prompt was computed elsewhere."""


NO_TOKEN = -1
"""In place of a sampled token if the logits are NaN or infinite: the request ends."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An executor's result of a plan: one token, or ``NO_TOKEN``, for each of ``plan.sampled``, in that order.

    ``prompt_logprobs`` come with the first token of a request that asked for them.
    """

    step_id: int
    token_ids: Seq[int]
    logprobs: dict[SeqId, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[SeqId, PromptLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Tokens of a completed step (pairs of ``seq_ids`` and ``token_ids``), and the sequences that ended with it.

    ``logprobs`` has those of these tokens whose requests asked for them; it may hold entries of other sequences.
    """

    seq_ids: Seq[SeqId]
    token_ids: Seq[int]
    finished: dict[SeqId, FinishReason]
    logprobs: dict[SeqId, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[SeqId, PromptLogprobs] = field(default_factory=dict)
