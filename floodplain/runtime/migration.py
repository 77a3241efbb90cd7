"""One running request on its way from one step loop to another: what both loops hold of it (Llumnix, section 4.2).

The source's blocks are held until the target has a copy: whatever fails before, the request goes on in the source from
its own blocks. Nothing here moves bytes or waits. Everything is called between two steps; some may be outstanding.
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
    """A request as its loop had it last.

    Attributes:
        seq_id: Its name there.
        num_tokens: Known tokens, prompt included.
        num_computed: Leading tokens whose KV is held.
    """

    seq_id: SeqId
    num_tokens: int
    num_computed: int


class Outgoing:
    """The source's end: references to blocks that another loop copies.

    Args:
        loop: That computes the request.
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
        """Hold the blocks that do not change any more, while the request runs on. False if it does not run."""
        seq = self._find()
        if seq is not None:
            self._hold(seq.blocks[: seq.num_sealed])
        return seq is not None

    def stop(self, num_copied: int) -> Stopped | None:
        """Hold all blocks that have KV of the request, which the caller then ends here.

        An outstanding step may still write behind ``num_computed`` tokens, where nothing reads.

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
        """The request comes back under a new name: let it run on from its blocks. Whether it does."""
        return _adopt(self._loop, seq_id, self._take(), self._num_computed, now)

    def release(self) -> None:
        """Nothing is to be copied any more. Safe to call twice."""
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
    """The target's end: blocks into which KV is copied; no step uses them.

    Args:
        loop: That is to go on with the request.

    Attributes:
        blocks: So far, in the request's order.
    """

    def __init__(self, loop: Loop) -> None:
        self.blocks: tuple[BlockId, ...] = ()
        self._loop = loop

    def reserve(self, num_blocks: int) -> Seq[BlockId] | None:
        """So many blocks more; None if there are too few."""
        more = self._loop.state.ledger.begin_load(num_blocks)
        if more is not None:
            self.blocks += tuple(more)
            self._loop.state.num_incoming_blocks += num_blocks
        return more

    def adopt(self, seq_id: SeqId, num_computed: int, now: float) -> bool:
        """All KV is there: let the request run on from it. Whether it does; else it is computed again.

        Raises:
            InvariantError: The blocks are not those of so many tokens.
        """
        blocks, ledger = self._take(), self._loop.state.ledger
        if len(blocks) != -(-num_computed // ledger.block_tokens):
            raise InvariantError(f"{num_computed} tokens of sequence {seq_id} are not in {len(blocks)} blocks")
        ledger.commit_load(blocks)
        return _adopt(self._loop, seq_id, blocks, num_computed, now)

    def release(self) -> None:
        """The request does not come, and no copy is under way. Safe to call twice."""
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
