"""Hands over requests from one step loop to another, with the KV that was computed for them.

A ``Record`` has a loop's tokens and KV of a request at a boundary, on the device and in swap space. ``adopt`` resumes a
request that was submitted to another loop from blocks that hold its KV already; without blocks its KV is recomputed
from its tokens (KunServe, section 4.2).

``Outgoing`` and ``Incoming`` migrate one running request while both loops run (Llumnix, section 4.2): the source's
blocks are held until the target has a copy, so if anything fails before, the request resumes in the source. Nothing
here moves bytes or waits. All calls are between two steps; some may be outstanding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.request import Request, SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.tiers import Tier, source_of_slot
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState, Source


@dataclass(frozen=True, slots=True)
class Record:
    """A loop's tokens and KV of a live request.

    ``num_tokens`` are known ones, prompt included. ``sources`` locate the blocks of the ``num_computed`` leading tokens
    with KV, in order (``core.tiers``).
    """

    request: Request
    num_tokens: int
    num_computed: int
    sources: tuple[int, ...]


def take_records(loop: Loop) -> list[Record]:
    """Records of all live requests of a loop without outstanding steps or loads, by priority and arrival."""
    records = []
    for seq in sorted(loop.state.sequences.values(), key=lambda one: one.order_key):
        if seq.status is Status.FINISHED:
            continue
        if seq.num_outstanding or seq.status is Status.LOADING:
            raise InvariantError(f"sequence {seq.seq_id} is handed over while a step or a copy runs")
        num_computed, sources = _find_kv(loop.state, seq)
        records.append(Record(seq.request, len(seq.tokens), num_computed, sources))
    return records


def _find_kv(state: LoopState, seq: Sequence) -> tuple[int, tuple[int, ...]]:
    """(leading tokens with KV, sources of their blocks); a waiting request has no KV of its own."""
    if seq.status is Status.RUNNING:
        return seq.num_computed, tuple(seq.blocks[: -(-seq.num_computed // state.ledger.block_tokens)])
    found = state.find_sources(seq) if seq.status is Status.SWAPPED else []
    near = list(takewhile(_is_near, found))
    return near[-1].num_tokens if near else 0, tuple(_number(source) for source in near)


def _is_near(source: Source) -> bool:
    """Peer memory is not read through this process."""
    return source.backup is None or source.backup.location.tier is Tier.HOST


def _number(source: Source) -> int:
    if source.backup is not None:
        return source_of_slot(source.backup.location.slot)
    if source.block is None:
        raise InvariantError("a source of KV is neither a block nor a backup")
    return source.block


def adopt(loop: Loop, seq_id: SeqId, blocks: Seq[BlockId], num_computed: int, now: float) -> bool:
    """Resume a waiting request from KV in owned ``blocks``; one reference to each becomes the request's.

    ``num_computed``: tokens whose KV they hold, fewer than its known tokens. False, and the blocks are freed, if there
    are none, it has ended or does not wait, or ``max_num_seqs`` are running: its KV is recomputed.
    """
    state = loop.state
    seq = state.sequences.get(seq_id)
    if not blocks or seq is None or seq.status is not Status.WAITING or len(state.running) >= state.config.max_num_seqs:
        state.ledger.free(blocks)
        return False
    if not 0 < num_computed < len(seq.tokens) or len(blocks) != -(-num_computed // state.ledger.block_tokens):
        raise InvariantError(f"{len(blocks)} blocks of {num_computed} tokens are not those of sequence {seq_id}")
    seq.blocks = list(blocks)
    seq.num_computed = seq.num_scheduled = num_computed
    state.note_start(seq, now)
    state.enter(seq, Status.RUNNING)
    state.stale_tables.add(seq_id)
    return True


class HeldBlocks:
    """Blocks of a new ledger that are held for handed-over requests, by a number of the caller's; some are shared."""

    def __init__(self, ledger: BlockLedger, rows: Mapping[int, Seq[BlockId]]) -> None:
        self._ledger = ledger
        self._rows = {number: tuple(row) for number, row in rows.items()}
        self._counts = Counter(block for row in self._rows.values() for block in row)
        for block in self._counts:
            ledger.reserve(block)
        ledger.commit_load(self._counts)

    @property
    def num_blocks(self) -> int:
        """Held blocks, each counted once."""
        return len(self._counts)

    def take(self, row: int) -> tuple[BlockId, ...]:
        """Stop holding the blocks of a request; a reference to each becomes the caller's."""
        blocks = self._rows.pop(row)
        for block in blocks:
            self._counts[block] -= 1
            if self._counts[block]:
                self._ledger.share_owned(block)
            else:
                del self._counts[block]
        return blocks

    def drop(self, row: int) -> None:
        """Free the blocks of a request that is not adopted, or without KV. No-op for a row that is not held."""
        if row in self._rows:
            self._ledger.free(self.take(row))


@dataclass(frozen=True, slots=True)
class Stopped:
    """Final state of a request in its source loop: known tokens, and leading tokens whose KV is held."""

    seq_id: SeqId
    num_tokens: int
    num_computed: int


class Outgoing:
    """The source side of a migration: references to blocks that another loop copies."""

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

        An outstanding step may still write behind ``num_computed`` tokens; that is not read. None, with nothing
        changed, if it does not run, or has fewer blocks than the target's ``num_copied`` (it was preempted meanwhile).
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
        return adopt(self._loop, seq_id, self._take(), self._num_computed, now)

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
    """The target side of a migration: blocks into which KV is copied; no step uses them."""

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
        """Resume the request from its copied KV. False if it does not run: then its KV is recomputed."""
        blocks, ledger = self._take(), self._loop.state.ledger
        if len(blocks) != -(-num_computed // ledger.block_tokens):
            raise InvariantError(f"{num_computed} tokens of sequence {seq_id} are not in {len(blocks)} blocks")
        ledger.commit_load(blocks)
        return adopt(self._loop, seq_id, blocks, num_computed, now)

    def release(self) -> None:
        """Free the blocks of an aborted migration; no copy is in flight. Safe to call twice."""
        self._loop.state.ledger.abort_load(self._take())

    def _take(self) -> tuple[BlockId, ...]:
        blocks, self.blocks = self.blocks, ()
        self._loop.state.num_incoming_blocks -= len(blocks)
        return blocks
