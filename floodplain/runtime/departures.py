"""Outbound transfers: swap-outs, backups of full blocks, and backups of cached prefixes.

A block with a backup is never copied again, so preempting a sequence whose full blocks were written behind copies at
most its last, partly filled block.
"""

from __future__ import annotations

from itertools import count, islice

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey, block_key
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import Preemption, PreemptionMode, PrefixBackupOrder, Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.tiers import Tier
from floodplain.runtime.state import LoopState


class Departures:
    """Begins outbound transfers and settles them.

    Args:
        state: Of the loop.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._tails = count()  # numbers the partial blocks that were copied

    def preempt(self, order: Preemption, now: float) -> Transfer | None:
        """Take a running sequence off the device.

        Returns:
            The copy that must be made; None if everything is backed up, or is to be recomputed.

        Raises:
            InvariantError: The sequence is in an outstanding step, or the tier has too few slots.
        """
        state, seq = self._state, self._state.expect(order.seq_id, Status.RUNNING)
        if seq.num_outstanding:
            raise InvariantError(f"sequence {seq.seq_id} is preempted in an outstanding step")
        is_swap = order.mode is PreemptionMode.SWAP and seq.num_computed > 0
        transfer = self._write_out(seq, order) if is_swap else None
        if not is_swap:
            state.release_backups(seq)
        state.free_blocks(seq)
        seq.lifecycle.record(EventKind.PREEMPTED, now)
        state.counters.preemptions["swap" if is_swap else "recompute"] += 1
        state.enter(seq, Status.SWAPPED if is_swap else Status.WAITING)
        return transfer

    def back_up(self, seq_id: SeqId, num_blocks: int, tier: Tier) -> Transfer | None:
        """Back up to ``num_blocks`` more full, computed blocks of a running sequence; None if none needs a copy.

        Blocks that have a backup already count: the sequence keeps these from now on, so that they are not evicted.
        """
        seq = self._state.expect(seq_id, Status.RUNNING)
        missing = self._keep_known(seq, num_blocks)
        return self._begin(seq, missing, tier, TransferKind.BACKUP, None) if missing else None

    def save_prefixes(self, order: PrefixBackupOrder) -> Transfer | None:
        """Back up the cached blocks that are evicted next; None if all have backups or slots are short."""
        state = self._state
        at_risk = state.ledger.next_evicted(order.num_at_risk)
        unsaved = ((block, key) for block, key in at_risk if state.backups.find(key) is None)
        missing = list(islice(unsaved, order.num_blocks))
        backups = state.backups.begin_write(order.tier, [key for _, key in missing])
        if not missing or backups is None:
            return None
        blocks = tuple(block for block, _ in missing)
        state.ledger.pin_cached(blocks)
        return state.transfers.begin(TransferKind.BACKUP, None, blocks, backups, None, None)

    def _write_out(self, seq: Sequence, order: Preemption) -> Transfer | None:
        missing = self._keep_known(seq)
        num_full, num_tail = divmod(seq.num_computed, self._state.ledger.block_tokens)
        if num_tail:
            missing.append((num_full, self._tail_key(seq)))
        if not missing:
            return None
        if order.tier is None:
            raise InvariantError(f"sequence {seq.seq_id} is swapped out to no tier")
        transfer = self._begin(seq, missing, order.tier, TransferKind.SWAP_OUT, order.reason)
        if num_tail:
            seq.tail = (seq.backups.pop(), seq.num_computed)
            seq.tail[0].is_private = True
        return transfer

    def _tail_key(self, seq: Sequence) -> BlockKey:
        """A new unique key for the sequence's partial block, which is never shared."""
        return block_key(BlockKey(seq.root + b"tail"), (seq.seq_id, next(self._tails)))

    def _keep_known(self, seq: Sequence, most: int | None = None) -> list[tuple[int, BlockKey]]:
        """Keep existing backups of up to ``most`` full blocks of which the sequence keeps none yet.

        Returns:
            (index, key) of those blocks that have no backup.
        """
        block_tokens = self._state.ledger.block_tokens
        keys = seq.keys_for(seq.num_computed // block_tokens, block_tokens)
        kept = {backup.key for backup in seq.backups}
        missing = []
        for index, key in islice(((index, key) for index, key in enumerate(keys) if key not in kept), most):
            backup = self._state.backups.find(key)
            if backup is None:
                missing.append((index, key))
            else:
                self._state.keep_backup(seq, backup)
        return missing

    def _begin(
        self, seq: Sequence, missing: list[tuple[int, BlockKey]], tier: Tier, kind: TransferKind, reason: Reason | None
    ) -> Transfer:
        state = self._state
        backups = self._reserve([key for _, key in missing], tier)
        for backup in backups:
            state.keep_backup(seq, backup)
        blocks = tuple(seq.blocks[index] for index, _ in missing)
        state.ledger.pin(blocks)
        state.sharing_changes.add(seq.seq_id)
        seq.num_leaving += len(blocks)
        return state.transfers.begin(kind, seq.seq_id, blocks, backups, reason, None)

    def _reserve(self, keys: list[BlockKey], tier: Tier) -> list[Backup]:
        """Allocate slots in ``tier``, and in other tiers for blocks that do not fit there.

        The policy counted a slot in ``tier`` for each block without a kept backup. Some blocks turned out to have an
        idle backup, which took a slot of its own tier: there is room over all tiers, but perhaps not in this one.
        """
        backups = self._state.backups.begin_write_from(tier, keys)
        if backups is None:
            raise InvariantError(f"{len(keys)} blocks shall go to {tier}, which has fewer slots, with all others too")
        return backups

    def settle(self, transfer: Transfer) -> None:
        """Unpin the blocks of an outbound transfer that has ended."""
        state = self._state
        state.ledger.unpin(transfer.blocks)
        seq = None if transfer.seq_id is None else state.sequences.get(transfer.seq_id)
        if seq is not None:
            seq.num_leaving -= len(transfer.blocks)
            state.row_changes.add(seq.seq_id)
        self._note_unpinned(seq, transfer.blocks)

    def _note_unpinned(self, seq: Sequence | None, blocks: tuple[BlockId, ...]) -> None:
        """Mark counts of exclusive blocks as stale, since unpinned blocks may have become exclusive."""
        state = self._state
        held = {block for block in blocks if state.ledger.refcount(block) == 1}
        if seq is not None and seq.status is Status.RUNNING and held.issubset(seq.blocks):
            state.sharing_changes.add(seq.seq_id)
        elif held:
            state.ledger.sharing_version += 1
