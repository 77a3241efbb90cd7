"""Fits a ranking of all live requests into memory: which sequences are preempted, resumed and scheduled."""

from __future__ import annotations

from collections.abc import Iterable

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Chunk, Decision, Preemption, PreemptionMode, Reason, Resumption
from floodplain.core.request import SeqId
from floodplain.core.sequence import Status
from floodplain.core.view import SequenceView, View
from floodplain.policy.growth import blocks_due, blocks_for
from floodplain.policy.prefixes import pays_to_fetch
from floodplain.policy.ranking import Ranking
from floodplain.policy.settings import SharingSettings
from floodplain.policy.swap import SwapBudget

UNPRICED_PREFILL = 256
"""Most prompt tokens in a step with decodes while the price of prompt tokens is unknown."""


class TokenBudget:
    """Tokens of one step that are left, for prompts and streams (AQUA, section 7: p prefill, d decode tokens).

    Every stream on the device gets its token, and prompts get the rest; in a step with streams, at most
    ``prefill_share`` of its time, so that they do not starve streams. None: no such limit.
    """

    def __init__(self, view: View, prefill_share: float | None) -> None:
        num_streams = sum(wants_one_token(view, row) for row in view.running)
        self.num_left = view.max_batched_tokens
        self._prefill = max(0, view.max_batched_tokens - num_streams)
        if num_streams and prefill_share is not None:
            self._prefill = min(self._prefill, prefill_cap(view, prefill_share))

    def prefill_for(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` prompt tokens fit into the step."""
        return max(0, min(num_tokens, self._prefill, self.num_left))

    def take_prefill(self, num_tokens: int) -> int:
        """Take as many of ``num_tokens`` prompt tokens as fit into the step; return how many."""
        num_taken = self.prefill_for(num_tokens)
        self._prefill -= num_taken
        self.num_left -= num_taken
        return num_taken

    def take_decode(self) -> None:
        """Take one decode token."""
        self.num_left -= 1


def wants_one_token(view: View, row: SequenceView) -> bool:
    """Whether a running sequence has one token to compute: a decode, or the chunk of a stream that was swapped in."""
    return view.step < row.end_step if row.is_decoding else row.num_remaining == 1


def prefill_cap(view: View, prefill_share: float) -> int:
    """Prompt tokens that take ``prefill_share`` of the time of a step with decodes; at least one block."""
    prices = view.prices
    if not (prices.step_s and prices.prefill_token_s):
        return UNPRICED_PREFILL
    prefill_s = prices.step_s * prefill_share / (1 - prefill_share)
    return max(view.block_tokens, int(prefill_s / prices.prefill_token_s))


def share(view: View, ranking: Ranking, settings: SharingSettings) -> Decision:
    """Decide one step that brings the device as close to ``ranking`` as memory allows."""
    if settings.is_synchronous and (view.loading or any(row.is_leaving for row in view.swapped)):
        return Decision()  # AQUA's switch: nothing computes before all copies have ended
    turn = _Turn(view, ranking, settings)
    turn.exchange()
    if settings.is_synchronous and turn.moves_kv:
        turn.begin_nothing()
    else:
        turn.schedule_residents()
    return turn.decision()


class _Turn:
    """Scratch state of one decision: blocks, tokens, swap slots and places that are left.

    ``free`` blocks can be allocated now, ``draining`` ones when copies have ended. ``reserved`` of the free blocks are
    for the growth of running and loading sequences within a slice: else an admission would cause a preemption at once.
    """

    def __init__(self, view: View, ranking: Ranking, settings: SharingSettings) -> None:
        self._view = view
        self._slice = ranking.slice_steps
        self._is_synchronous = settings.is_synchronous
        self._reason = ranking.reason
        self._staying = ranking.staying
        self._refills = ranking.refills
        self._absent = [row for row in ranking.rows if row.status in (Status.WAITING, Status.SWAPPED)]
        self._residents = [row for row in ranking.rows if row.status is Status.RUNNING]
        self._rank = {row.seq_id: rank for rank, row in enumerate(ranking.rows)}
        self._free = view.num_available_blocks
        self._draining = view.num_draining_blocks
        self._reserved = sum(blocks_due(view, row, self._slice) for row in (*view.running, *view.loading))
        self._num_seats = view.max_num_seqs - len(view.running) - len(view.loading)
        self._tokens = TokenBudget(
            view, (ranking.prefill_share or settings.prefill_share) if ranking.caps_prompts else None
        )
        self._prompts = [
            (self._rank[row.seq_id], row.num_remaining)
            for row in self._residents
            if not row.is_decoding and not wants_one_token(view, row)
        ]
        self._swap = SwapBudget(view)
        self._gone: set[SeqId] = set()
        self._has_shared = False  # an entering sequence counts on blocks that residents hold: no more preemptions
        self._preemptions: list[Preemption] = []
        self._resumptions: list[Resumption] = []
        self._coming: set[BlockKey] = set()  # first content that each of these resumptions copies in
        self._chunks: list[Chunk] = []
        self._admissions: list[Chunk] = []
        self._decodes: set[SeqId] = set()

    def decision(self) -> Decision:
        staying = [row for row in self._residents if row.seq_id not in self._gone]
        return Decision(
            preemptions=tuple(self._preemptions),
            resumptions=tuple(self._resumptions),
            decodes=tuple([row.seq_id for row in self._view.running if row.seq_id in self._decodes]),
            chunks=tuple(self._chunks),
            admissions=tuple(self._admissions),
            backups=() if self._is_synchronous else self._swap.write_behind(reversed(staying)),
            reason=self._reason or self._swap.reason,
        )

    # -- absent sequences ------------------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Resume or admit absent sequences in rank order, preempting residents that rank below them.

        The first one without room ends the loop: a small request must not pass a large one for ever. If swap space is
        full, only KV that is cheaper to recompute than to copy back is dropped; waiting requests wait for swap space,
        while swapped and running ones still take turns. If the entering sequence shares blocks and residents were
        preempted, those blocks may be gone: it enters in the next step, and its room is kept.
        """
        for row in self._absent:
            if row.is_leaving or not self._can_begin(row):
                continue  # its swap-out has not ended, or none of its tokens fits into this step
            num_blocks = self._blocks_to_enter(row)
            if self._needs_copy(row) and self._is_coming(row):
                if self._has_room(num_blocks):
                    self._keep_room(num_blocks)
                continue
            if not self._has_room(num_blocks):
                if not self._make_room(num_blocks, row, self._turned_out(row), Reason.SLICE_ENDED):
                    if self._swap.is_short and row.status is Status.WAITING:
                        continue
                    return
                if not self._has_room(num_blocks):
                    if not self._refills:
                        return
                    self._keep_room(num_blocks)
                    continue
            if not (row.num_shared_blocks and self._gone):
                self._enter(row)
            self._free -= num_blocks
            self._num_seats -= 1

    def _can_begin(self, row: SequenceView) -> bool:
        if row.status is Status.SWAPPED:
            return True
        return not self._swap.is_short and (self._needs_copy(row) or self._tokens_to_begin(row) > 0)

    def _needs_copy(self, row: SequenceView) -> bool:
        """Whether it enters by a copy: a swapped sequence's KV, or a waiting one's prefix if its slots are kept."""
        if row.status is Status.SWAPPED:
            return True
        return pays_to_fetch(self._view, row) and (self._is_coming(row) or self._swap.can_hold_prefix(row))

    def _is_coming(self, row: SequenceView) -> bool:
        return row.is_arriving or row.next_copy in self._coming

    def _tokens_to_begin(self, row: SequenceView) -> int:
        """Prompt tokens that fit into the step after those of resident prompts that rank above ``row``."""
        num_ahead = sum(num_tokens for rank, num_tokens in self._prompts if rank < self._rank[row.seq_id])
        num_tokens = row.num_remaining - row.num_cached_tokens
        return max(0, self._tokens.prefill_for(num_ahead + num_tokens) - num_ahead)

    def _blocks_to_enter(self, row: SequenceView) -> int:
        """Blocks to allocate for all its tokens and one slice, at most the pool's, less those it shares."""
        num_blocks = blocks_for(self._view, row.num_tokens + self._slice)
        return min(num_blocks, self._view.num_blocks) - row.num_shared_blocks

    def _enter(self, row: SequenceView) -> None:
        """Resume or admit it; no-op if preemptions took its prefix's slots and no token of it fits."""
        if row.status is Status.SWAPPED:
            self._resume(row, Reason.SLICE_BEGINS)
        elif self._needs_copy(row):
            self._resume(row, Reason.PREFIX_IN_SWAP)
            self._swap.hold_prefix(row)
        elif num_tokens := self._tokens_to_begin(row):
            self._admissions.append(Chunk(row.seq_id, self._tokens.take_prefill(num_tokens)))
        self._has_shared = self._has_shared or row.num_shared_blocks > 0

    def _resume(self, row: SequenceView, reason: Reason) -> None:
        self._resumptions.append(Resumption(row.seq_id, reason))
        if row.next_copy is not None:
            self._coming.add(row.next_copy)

    @property
    def moves_kv(self) -> bool:
        return bool(self._resumptions) or any(order.mode is PreemptionMode.SWAP for order in self._preemptions)

    def begin_nothing(self) -> None:
        """Drop all admissions: in synchronous mode nothing computes before the copies of this step have ended."""
        self._admissions.clear()

    # -- residents -------------------------------------------------------------------------------------------------

    def schedule_residents(self) -> None:
        """Give each resident a token or a chunk, in rank order; if blocks run out, preempt the lowest-ranked."""
        step = self._view.step
        for row in self._residents:
            if row.seq_id in self._gone:
                continue
            if not row.is_decoding:
                self._schedule_chunk(row)
            elif step < row.end_step and self._tokens.num_left and (step < row.block_due_step or self._take(1, row)):
                self._tokens.take_decode()
                self._decodes.add(row.seq_id)

    def _schedule_chunk(self, row: SequenceView) -> None:
        is_stream = wants_one_token(self._view, row)
        num_tokens = min(1, self._tokens.num_left) if is_stream else self._tokens.prefill_for(row.num_remaining)
        num_blocks = blocks_for(self._view, row.num_scheduled + num_tokens, num_tokens) - row.num_blocks
        if not num_tokens or (num_blocks > 0 and not self._take(num_blocks, row)):
            return
        self._chunks.append(Chunk(row.seq_id, num_tokens))
        if is_stream:
            self._tokens.take_decode()
        else:
            self._tokens.take_prefill(num_tokens)

    def _take(self, num_blocks: int, row: SequenceView) -> bool:
        """Allocate blocks to a resident, preempting those below it, then itself. False: it is not scheduled."""
        if num_blocks > self._free + self._draining:
            self._reserved = 0  # the need of this step goes before growth later in the slice
            if not self._make_room(num_blocks, row, self._below(row), Reason.POOL_EXHAUSTED) and self._can_leave(row):
                self._send_away(row, Reason.POOL_EXHAUSTED)
        if num_blocks > self._free or row.seq_id in self._gone:
            return False
        self._free -= num_blocks
        return True

    # -- making room -----------------------------------------------------------------------------------------------

    def _has_room(self, num_blocks: int) -> bool:
        return num_blocks <= self._free - self._reserved and self._num_seats > 0

    def _keep_room(self, num_blocks: int) -> None:
        """Keep room for a sequence that enters when copies have ended: draining blocks first, then free ones."""
        num_drained = min(num_blocks, self._draining)
        self._draining -= num_drained
        self._free -= num_blocks - num_drained
        self._num_seats -= 1

    def _below(self, row: SequenceView) -> Iterable[SequenceView]:
        for victim in reversed(self._residents):
            if self._rank[victim.seq_id] <= self._rank[row.seq_id]:
                return
            if self._can_leave(victim):
                yield victim

    def _turned_out(self, row: SequenceView) -> Iterable[SequenceView]:
        """Residents below ``row`` whose slice is over, while swap space takes their blocks without a backup.

        A sequence that would lose its KV stays until it decodes: else recomputed prompts might never give a token.
        """
        num_slots = 0
        for victim in self._below(row):
            if victim.seq_id not in self._staying and (victim.is_decoding or not self._swap.loses_kv(victim)):
                num_slots += self._swap.num_copied(victim)
                if not self._swap.can_keep(victim, num_slots):
                    return
                yield victim

    def _can_leave(self, row: SequenceView) -> bool:
        is_busy = row.seq_id in self._view.outstanding or row.seq_id in self._decodes
        return not (is_busy or self._has_shared or row.seq_id in self._gone)

    def _make_room(self, num_blocks: int, row: SequenceView, victims: Iterable[SequenceView], reason: Reason) -> bool:
        """Preempt victims if that makes room for ``row``, now or when copies have ended; else preempt none."""
        num_there, reserved = self._free + self._draining, self._reserved
        missing_seats = 0 if row.status is Status.RUNNING else 1 - self._num_seats
        chosen: list[SequenceView] = []
        for victim in victims:
            if num_blocks <= num_there - reserved and missing_seats <= 0:
                break
            chosen.append(victim)
            num_there += victim.exclusive_blocks
            reserved = max(0, reserved - blocks_due(self._view, victim, self._slice))
            missing_seats -= 1
        if num_blocks > num_there - reserved or missing_seats > 0:
            return False
        for victim in chosen:
            self._send_away(victim, reason)
        return True

    def _send_away(self, row: SequenceView, reason: Reason) -> None:
        preemption, num_copied = self._swap.preempt(row, reason)
        self._preemptions.append(preemption)
        self._gone.add(row.seq_id)
        num_copied = min(num_copied, row.exclusive_blocks)
        self._free += row.exclusive_blocks - num_copied
        self._draining += num_copied
        self._reserved = max(0, self._reserved - blocks_due(self._view, row, self._slice))
        self._num_seats += 1
