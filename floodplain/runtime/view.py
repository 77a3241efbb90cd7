"""Builds the frozen views that policies read. Rows are kept and replaced only when they changed."""

from __future__ import annotations

from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from floodplain.core.backups import Backup
from floodplain.core.blocks import BlockState
from floodplain.core.changes import ChangeReader
from floodplain.core.hashing import BlockKey
from floodplain.core.plan import StepPlan
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.view import SequenceView, View
from floodplain.runtime.state import LoopState


@dataclass(frozen=True, slots=True)
class Found:
    """What can be restored of one absent sequence: fields of its row (``core.view``).

    ``watched``: the contents that this depends on: those of the run that can be restored, and the first missing one.
    """

    num_cached_tokens: int
    num_shared_blocks: int
    num_backed_blocks: int
    num_restorable_tokens: int
    next_copy: BlockKey | None
    is_arriving: bool
    watched: list[BlockKey]


class ContentWatch:
    """Caches one ``Found`` per sequence, and drops it when a content that it depends on changes.

    A prefix can be hundreds of blocks long and a hundred requests may wait for it.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._changes = [ChangeReader(state.ledger.changed_keys), ChangeReader(state.backups.changed_keys)]
        self._found: dict[SeqId, Found] = {}
        self._watchers: dict[BlockKey, set[SeqId]] = {}

    def refresh(self, changed: Set[SeqId]) -> set[SeqId]:
        """Drop results that may have changed since the last call, or are of ``changed`` sequences; return their ids."""
        stale = {seq_id for seq_id in changed if seq_id in self._found}
        watchers = self._watchers
        for changes in self._changes:
            for key in changes.take(watchers):
                if key in watchers:
                    stale |= watchers[key]
        for seq_id in stale:
            self._forget(seq_id)
        return stale

    def keep_only(self, seq_ids: Set[SeqId]) -> Set[SeqId]:
        """Keep results of these sequences only; return the ids of those whose results were dropped."""
        gone = self._found.keys() - seq_ids
        for seq_id in gone:
            self._forget(seq_id)
        return gone

    def find(self, seq: Sequence) -> Found:
        """What can be restored of a sequence: at most all tokens but one, which is left to compute."""
        found = self._found.get(seq.seq_id)
        if found is None:
            found = self._found[seq.seq_id] = self._look_up(seq)
            for key in found.watched:
                self._watchers.setdefault(key, set()).add(seq.seq_id)
        return found

    def _forget(self, seq_id: SeqId) -> None:
        for key in self._found.pop(seq_id).watched:
            watchers = self._watchers[key]
            watchers.remove(seq_id)
            if not watchers:
                del self._watchers[key]

    def _look_up(self, seq: Sequence) -> Found:
        """Look up a sequence: leading hits first, on a fast path, since most sequences have nothing else.

        A waiting request only shares its leading hits when it starts; a swapped one gets all that is on the device.
        """
        ledger, block_tokens = self._state.ledger, self._state.ledger.block_tokens
        keys = seq.keys_for((len(seq.tokens) - 1) // block_tokens, block_tokens)
        hits = ledger.find_prefix(keys)
        num_shared = num_shared_hits = len(hits) - ledger.count_cached(hits)
        num_device, num_backed, is_waiting = len(hits), 0, seq.status is Status.WAITING
        next_copy: Backup | None = None
        for key in keys[len(hits) :]:
            block = ledger.find(key)
            if block is not None:
                num_device += 1
                num_shared += ledger.state(block) is not BlockState.CACHED
            elif (backup := self._state.backups.find_whole(key)) is not None:
                num_backed += 1
                next_copy = next_copy or backup
            else:
                break
        num_full = num_device + num_backed
        num_tokens = num_full * block_tokens
        if seq.tail is not None and seq.tail[0].is_whole and seq.tail[1] // block_tokens == num_full:
            num_backed, num_tokens = num_backed + 1, seq.tail[1]
        return Found(
            num_cached_tokens=(len(hits) if is_waiting else num_device) * block_tokens,
            num_shared_blocks=num_shared_hits if is_waiting else num_shared,
            num_backed_blocks=num_backed,
            num_restorable_tokens=num_tokens,
            next_copy=None if next_copy is None else next_copy.key,
            is_arriving=next_copy is not None and next_copy.num_readers > 0,
            watched=keys[: num_full + 1],
        )


_NEVER = 2**62
_NOTHING = Found(0, 0, 0, 0, None, False, [])


class ViewBuilder:
    """Builds the view of each step from the last one.

    In a steady state of decoding no row changes between two block boundaries, and the tuples are reused as they are.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._rows: dict[SeqId, SequenceView] = {}
        self._exclusive: dict[SeqId, tuple[int, int]] = {}  # (exclusive blocks, blocks held) when last counted
        self._running: tuple[SequenceView, ...] = ()
        self._changes = ChangeReader(state.row_changes)
        self._sharing_changes = ChangeReader(state.sharing_changes)
        self._sharing_version = -1
        self._watch = ContentWatch(state)
        self._head: tuple[Sequence, ...] | None = None
        self._waiting: tuple[SequenceView, ...] = ()
        self._swapped: tuple[SequenceView, ...] = ()

    def build(self, step: int, outstanding: Seq[StepPlan]) -> View:
        """The view for planning step ``step`` while the plans ``outstanding`` are not complete."""
        state, ledger = self._state, self._state.ledger
        changed = self._changes.take(chain(self._rows, state.sequences))
        self._refresh_absent(step, changed)
        self._refresh_running(step, changed)
        return View(
            step=step,
            running=self._running,
            waiting=self._waiting,
            num_waiting=len(state.waiting),
            swapped=self._swapped,
            loading=tuple([self._loading_row(seq, step) for seq in state.loading]),
            outstanding=frozenset(chain.from_iterable(map(_members, outstanding))),
            num_available_blocks=ledger.num_available,
            num_empty_blocks=ledger.num_empty,
            num_draining_blocks=ledger.num_draining,
            key_credits=state.accounts.credits,
            num_blocks=ledger.num_blocks + state.num_returning_blocks,
            block_tokens=ledger.block_tokens,
            max_batched_tokens=state.config.max_batched_tokens,
            max_num_seqs=state.config.max_num_seqs,
            tiers=state.links.view_tiers(state.transfers),
            prices=state.prices.now,
            demand=state.demand.now,
            completion_step=state.completion_step,
            depth=state.config.depth,
            outstanding_chunks=tuple(
                (chunk.start, len(chunk.token_ids)) for plan in outstanding for chunk in plan.prefills
            ),
        )

    # -- running ---------------------------------------------------------------------------------------------------

    def _refresh_running(self, step: int, changed: set[SeqId]) -> None:
        state = self._state
        recounted = self._sharing_changes.take(self._exclusive)
        if self._sharing_version != state.ledger.sharing_version:
            self._sharing_version = state.ledger.sharing_version
            self._exclusive.clear()
            changed.update(seq.seq_id for seq in state.running)
        for seq_id in recounted:
            self._exclusive.pop(seq_id, None)
        changed |= recounted
        if changed:
            for seq_id in changed:
                seq = state.sequences.get(seq_id)
                if seq is not None and seq.status is Status.RUNNING:
                    self._rows[seq_id] = self._running_row(seq, step)
                    continue
                self._exclusive.pop(seq_id, None)
                if seq is None:
                    self._rows.pop(seq_id, None)
            rows = self._rows
            self._running = tuple([rows[seq.seq_id] for seq in state.running])

    def _running_row(self, seq: Sequence, step: int) -> SequenceView:
        room = len(seq.blocks) * self._state.ledger.block_tokens - seq.num_scheduled
        return self._make_row(
            seq,
            step,
            exclusive_blocks=self._count_exclusive(seq),
            block_due_step=step + room if seq.is_decoding else _NEVER,
            end_step=step + seq.max_total - seq.num_expected if seq.is_decoding else _NEVER,
            num_backed_blocks=len(seq.backups),
        )

    def _count_exclusive(self, seq: Sequence) -> int:
        """Blocks that only this sequence holds; recounted after sharing changed: tables grow by such ones."""
        num_exclusive, num_blocks = self._exclusive.get(seq.seq_id, (-1, 0))
        if num_exclusive < 0:
            num_exclusive = self._state.ledger.count_exclusive(seq.blocks)
        else:
            num_exclusive += len(seq.blocks) - num_blocks
        self._exclusive[seq.seq_id] = (num_exclusive, len(seq.blocks))
        return num_exclusive

    # -- elsewhere -------------------------------------------------------------------------------------------------

    def _refresh_absent(self, step: int, changed: set[SeqId]) -> None:
        """Rebuild the rows of waiting and swapped sequences for which the restorable contents changed."""
        state = self._state
        forgotten = self._watch.refresh(changed)
        head = state.waiting.shown()
        if head is self._head and not forgotten and not changed:
            return
        forgotten |= self._watch.keep_only({seq.seq_id for seq in chain(head, state.swapped)})
        for seq_id in forgotten | changed:
            self._rows.pop(seq_id, None)
        self._head = head
        rows = self._rows
        self._waiting = tuple([rows.get(seq.seq_id) or self._absent_row(seq, step) for seq in head])
        self._swapped = tuple([rows.get(seq.seq_id) or self._absent_row(seq, step) for seq in state.swapped])

    def _absent_row(self, seq: Sequence, step: int) -> SequenceView:
        if seq.status is Status.WAITING and not self._state.ledger.caches_prefixes:
            row = self._make_row(seq, step)
        else:
            row = self._make_row(seq, step, self._watch.find(seq))
        self._rows[seq.seq_id] = row
        return row

    def _loading_row(self, seq: Sequence, step: int) -> SequenceView:
        return self._make_row(seq, step, num_backed_blocks=min(len(seq.backups), seq.num_arriving))

    def _make_row(
        self,
        seq: Sequence,
        step: int,
        found: Found = _NOTHING,
        *,
        exclusive_blocks: int = 0,
        block_due_step: int = _NEVER,
        end_step: int = _NEVER,
        num_backed_blocks: int = 0,
    ) -> SequenceView:
        return SequenceView(
            seq_id=seq.seq_id,
            status=seq.status,
            order_key=seq.order_key,
            client=seq.request.client,
            num_prompt=seq.num_prompt,
            since_step=step,
            num_tokens=seq.num_expected,
            num_scheduled=seq.num_scheduled,
            num_blocks=len(seq.blocks) or seq.num_arriving,
            exclusive_blocks=exclusive_blocks,
            is_decoding=seq.is_decoding,
            block_due_step=block_due_step,
            end_step=end_step,
            num_cached_tokens=found.num_cached_tokens,
            num_shared_blocks=found.num_shared_blocks,
            num_backed_blocks=num_backed_blocks or found.num_backed_blocks,
            num_restorable_tokens=found.num_restorable_tokens,
            entered_step=seq.entered_step,
            last_token_s=seq.lifecycle.token_times_s[-1] if seq.lifecycle.token_times_s else None,
            credit=seq.account.credit,
            parent=seq.account.parent,
            num_ended_tokens=seq.account.num_ended_tokens,
            is_leaving=seq.num_leaving > 0,
            goals=seq.request.goals,
            first_token_s=seq.lifecycle.token_times_s[0] if seq.lifecycle.token_times_s else None,
            next_copy=found.next_copy,
            is_arriving=found.is_arriving,
        )


def _members(plan: StepPlan) -> Iterator[SeqId]:
    yield from plan.decodes
    yield from (chunk.seq_id for chunk in plan.prefills)
