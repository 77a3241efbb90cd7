"""Migration of a running request: the blocks that both step loops hold (Llumnix, section 4.2).

The source's blocks are held until the target has a copy: if anything fails before, the request resumes in the source
from its own blocks. Nothing here moves bytes or waits. All calls are between two steps; some may be outstanding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import Request, SeqId
from floodplain.core.sequence import Sequence
from floodplain.runtime.handover import adopt
from floodplain.runtime.loop import Loop


@dataclass(frozen=True, slots=True)
class Stopped:
    """Final state of a request in its source loop.

    Attributes:
        seq_id: Its sequence id there.
        num_tokens: Known tokens, prompt included.
        num_computed: Leading tokens whose KV is held.
    """

    seq_id: SeqId
    num_tokens: int
    num_computed: int


class Outgoing:
    """The source side: references to blocks that another loop copies.

    Args:
        loop: The loop that computes the request.
        request: The object that was submitted.
    """

    def __init__(self, loop: Loop, request: Request) -> None:
        self._loop, self._request = loop, request
        self._num_computed = 0

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """Held blocks, in the request's order."""
        return self._loop.state.held_tables.get(self, ())

    def hold_sealed(self) -> bool:
        """Hold the sealed blocks, which do not change, while the request runs. False if it does not run."""
        seq = self._find()
        if seq is not None:
            self._hold(seq.blocks[: seq.num_sealed])
        return seq is not None

    def stop(self, num_copied: int) -> Stopped | None:
        """Hold all blocks that have KV of the request, which the caller then ends in this loop.

        An outstanding step may still write behind ``num_computed`` tokens, which are not read.

        Args:
            num_copied: Leading blocks that the target has.

        Returns:
            None, with nothing changed, if it does not run, or has fewer blocks (it was preempted meanwhile).
        """
        seq = self._find()
        if seq is None or not 0 < seq.num_computed < len(seq.tokens):
            return None
        blocks = seq.blocks[: -(-seq.num_computed // self._loop.state.ledger.block_tokens)]
        if len(blocks) < num_copied:
            return None
        self._hold(blocks)
        self._num_computed = seq.num_computed
        return Stopped(seq.seq_id, len(seq.tokens), seq.num_computed)

    def adopt(self, seq_id: SeqId, now: float) -> bool:
        """Resume the request in the source from its blocks, under a new sequence id. Returns whether it runs."""
        return _adopt(self._loop, seq_id, self._take(), self._num_computed, now)

    def release(self) -> None:
        """Drop the references when no more is to be copied. Safe to call twice."""
        self._loop.state.ledger.free(self._take())

    def _find(self) -> Sequence | None:
        found = (seq for seq in self._loop.state.running if seq.request is self._request)
        return next(found, None)

    def _hold(self, blocks: Seq[BlockId]) -> None:
        ledger, before = self._loop.state.ledger, self._take()
        for block in blocks:
            ledger.share_owned(block)
        ledger.free(before)
        self._loop.state.held_tables[self] = tuple(blocks)

    def _take(self) -> tuple[BlockId, ...]:
        return self._loop.state.held_tables.pop(self, ())


class Incoming:
    """The target side: blocks into which KV is copied; no step uses them.

    Args:
        loop: The loop that is to resume the request.

    Attributes:
        blocks: Blocks reserved so far, in the request's order.
    """

    def __init__(self, loop: Loop) -> None:
        self.blocks: tuple[BlockId, ...] = ()
        self._loop = loop

    def reserve(self, num_blocks: int) -> Seq[BlockId] | None:
        """Allocate ``num_blocks`` more blocks; None if there are too few."""
        more = self._loop.state.ledger.begin_load(num_blocks)
        if more is not None:
            self.blocks += tuple(more)
            self._loop.state.num_incoming_blocks += num_blocks
        return more

    def adopt(self, seq_id: SeqId, num_computed: int, now: float) -> bool:
        """Resume the request from its copied KV. False if it does not run: then its KV is recomputed.

        Raises:
            InvariantError: The number of blocks does not match ``num_computed``.
        """
        blocks, ledger = self._take(), self._loop.state.ledger
        if len(blocks) != -(-num_computed // ledger.block_tokens):
            raise InvariantError(f"{num_computed} tokens of sequence {seq_id} are not in {len(blocks)} blocks")
        ledger.commit_load(blocks)
        return _adopt(self._loop, seq_id, blocks, num_computed, now)

    def release(self) -> None:
        """Free the blocks of an aborted migration; no copy is in flight. Safe to call twice."""
        self._loop.state.ledger.abort_load(self._take())

    def _take(self) -> tuple[BlockId, ...]:
        blocks, self.blocks = self.blocks, ()
        self._loop.state.num_incoming_blocks -= len(blocks)
        return blocks


def _adopt(loop: Loop, seq_id: SeqId, blocks: Seq[BlockId], num_computed: int, now: float) -> bool:
    is_running = bool(blocks) and adopt(loop, seq_id, blocks, num_computed, now)
    if not is_running:
        loop.state.ledger.free(blocks)
    return is_running
