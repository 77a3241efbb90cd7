"""First come, first served, as vLLM V1 does it: the baseline.

One token budget per step is shared by decodes and prefill chunks. If a running sequence finds no free block, the latest
arrival is preempted and will recompute; no waiting request starts in such a step. Otherwise waiting requests start in
order of arrival, until the first one whose tokens do not all fit into the free blocks (vLLM's default,
``scheduler_reserve_full_isl``). A prefix in swap space is a hit, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Chunk, Decision, Preemption, PreemptionMode, Reason, Resumption
from floodplain.core.request import OrderKey, SeqId
from floodplain.core.sequence import Sequence
from floodplain.core.view import SequenceView, View
from floodplain.policy.base import Standing
from floodplain.policy.growth import blocks_for, count_spare_blocks
from floodplain.policy.microbatch import MicrobatchRule, can_go_on
from floodplain.policy.prefixes import count_at_risk, pays_to_fetch, prefix_backup


class FcfsPolicy:
    """First come, first served (lower ``priority`` first), with recompute preemption of the latest arrival.

    ``saves_prefixes``: back up cached prefixes that are about to be evicted, if there is swap space.
    """

    name = "fcfs"
    waiting_window = 64
    num_newest = 0
    keeps_goals = False
    chooses_admissions = False

    def __init__(self, *, saves_prefixes: bool = False, microbatches: MicrobatchRule | None = None) -> None:
        self._saves_prefixes = saves_prefixes
        self._microbatches = microbatches or MicrobatchRule()

    def waiting_key(self, seq: Sequence) -> OrderKey:
        """(priority, arrival, id): a preempted request is older than waiting ones, so it is first again."""
        return seq.order_key

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        """One step of FCFS."""
        step = _Step(view, self._microbatches)
        step.schedule_running()
        if not step.is_short_of_blocks:
            step.admit_waiting()
        decision = step.decision()
        if not (self._saves_prefixes and view.tiers):
            return decision
        num_spare = count_spare_blocks(view, num_steps=2)  # this one, and the next, planned beside it
        order = prefix_backup(view, decision, num_spare)
        return decision if order is None else replace(decision, prefix_backup=order)

    def stands(self, view: View) -> Standing | None:
        """While the first waiting request does not fit: blocks become fewer.

        A block that becomes shared with it is full, so that its owner takes another one in the same step.
        """
        has_seat = len(view.running) + len(view.loading) < view.max_num_seqs
        if view.waiting and has_seat and view.tiers and self._fits(view, view.waiting[0]):
            return None  # its prefix is fetched, or comes with another request's, by prices
        return Standing(num_at_risk=count_at_risk(view) if self._saves_prefixes else 0)

    def _fits(self, view: View, row: SequenceView) -> bool:
        return blocks_for(view, row.num_tokens) - row.num_shared_blocks <= view.num_available_blocks


class _Step:
    """Scratch state of one decision: the token budget and the blocks that are left."""

    def __init__(self, view: View, rule: MicrobatchRule) -> None:
        self._view = view
        self._budget = rule.open_budget(view)
        self._blocks = view.num_available_blocks
        self._num_kept = len(view.running)  # the later ones are preempted, or held back until they can be
        self._decodes: list[SeqId] = []
        self._chunks: list[Chunk] = []
        self._admissions: list[Chunk] = []
        self._preemptions: list[Preemption] = []
        self._resumptions: list[Resumption] = []
        self._coming: set[BlockKey] = set()  # first content that each of these resumptions copies in
        self.is_short_of_blocks = False

    def decision(self) -> Decision:
        return Decision(
            preemptions=tuple(self._preemptions),
            resumptions=tuple(self._resumptions),
            decodes=tuple(self._decodes),
            chunks=tuple(self._chunks),
            admissions=tuple(self._admissions),
        )

    def schedule_running(self) -> None:
        """Give every running sequence its next token or chunk, oldest first, preempting the last ones at need."""
        step, decodes, budget = self._view.step, self._decodes, self._budget
        rows: Iterable[tuple[int, SequenceView]] = enumerate(self._view.running)
        if self._view.outstanding:
            rows = [(index, row) for index, row in rows if can_go_on(self._view, row)]
        for index, row in rows:
            if index >= self._num_kept or not budget.num_tokens:
                break
            if not row.is_decoding:
                self._schedule_chunk(index, row)
            elif budget.is_shared and not budget.has_stream_room:
                continue  # a later step computes it
            elif step < row.end_step and (step < row.block_due_step or self._can_take(1, index)):
                decodes.append(row.seq_id)
                if budget.is_shared:
                    budget.pay_stream(row.num_scheduled)
                else:
                    budget.num_tokens -= 1

    def admit_waiting(self) -> None:
        """Start waiting sequences in order, each with as large a chunk as the budget allows."""
        num_free_seqs = self._view.max_num_seqs - len(self._view.running) - len(self._view.loading)
        for row in self._view.waiting[: max(0, num_free_seqs)]:
            if blocks_for(self._view, row.num_tokens) - row.num_shared_blocks > self._blocks:
                return
            if pays_to_fetch(self._view, row):
                self._fetch(row)
                continue
            num_tokens = self._budget.most(row.num_cached_tokens, row.num_remaining - row.num_cached_tokens)
            if not num_tokens:
                return
            self._budget.pay(row.num_cached_tokens, num_tokens)
            self._blocks -= (
                blocks_for(self._view, row.num_cached_tokens + num_tokens, num_tokens) - row.num_shared_blocks
            )
            self._admissions.append(Chunk(row.seq_id, num_tokens))

    def _fetch(self, row: SequenceView) -> None:
        """Fetch a waiting request's prefix from swap space, or keep room if another request's copy brings it."""
        self._blocks -= blocks_for(self._view, row.num_restorable_tokens) - row.num_shared_blocks
        if row.is_arriving or row.next_copy in self._coming:
            return
        self._resumptions.append(Resumption(row.seq_id, Reason.PREFIX_IN_SWAP))
        if row.next_copy is not None:
            self._coming.add(row.next_copy)

    def _schedule_chunk(self, index: int, row: SequenceView) -> None:
        """Schedule a chunk beside the later rows' decodes: a long prompt of any priority must not stop streams."""
        others = self._view.running[index + 1 :]
        num_decodes = sum(later.is_decoding and can_go_on(self._view, later) for later in others)
        num_tokens = self._budget.most(row.num_scheduled, row.num_remaining, num_decodes)
        num_blocks = blocks_for(self._view, row.num_scheduled + num_tokens, num_tokens) - row.num_blocks
        if num_tokens and self._can_take(num_blocks, index):
            self._chunks.append(Chunk(row.seq_id, num_tokens))
            self._budget.pay(row.num_scheduled, num_tokens)

    def _can_take(self, num_blocks: int, index: int) -> bool:
        """Allocate blocks to running sequence ``index``, preempting later ones at need, in the end itself.

        False without a preemption if a copy in flight will free blocks, or if the latest arrival is still loading.
        """
        while num_blocks > self._blocks:
            self.is_short_of_blocks = True
            if num_blocks <= self._blocks + self._view.num_draining_blocks or self._is_latest_loading():
                return False
            self._num_kept -= 1
            victim = self._view.running[self._num_kept]
            if victim.seq_id in self._view.outstanding:
                return False  # cannot be preempted now; no later row is scheduled, so it can be in a coming step
            self._preemptions.append(Preemption(victim.seq_id, PreemptionMode.RECOMPUTE, Reason.POOL_EXHAUSTED))
            self._blocks += victim.exclusive_blocks
            if self._num_kept == index:
                return False
        self._blocks -= num_blocks
        return True

    def _is_latest_loading(self) -> bool:
        """Whether a loading sequence arrived later than every running one that can still be preempted."""
        latest = self._view.running[self._num_kept - 1]
        return any(row.order_key > latest.order_key for row in self._view.loading)
