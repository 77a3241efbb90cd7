"""Hands over requests from one step loop to another, with the KV that was computed for them.

A ``Record`` has a loop's tokens and KV of a request at a boundary, on the device and in swap space. ``adopt`` resumes a
request that was submitted to another loop from blocks that hold its KV already. Without blocks nothing is adopted: the
request waits, and its KV is recomputed from its tokens (KunServe, section 4.2).
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
from floodplain.core.kv_sources import source_of_slot
from floodplain.core.request import Request, SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.tiers import Tier
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopState, Source


@dataclass(frozen=True, slots=True)
class Record:
    """A loop's tokens and KV of a live request.

    Attributes:
        request: As it was submitted.
        num_tokens: Known tokens, prompt included.
        num_computed: Leading tokens whose KV is in ``sources``.
        sources: Locations of the blocks of these tokens, in order (``core.kv_sources``).
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
    """Whether a source is on the device or in host memory: peer memory is not read through this process."""
    return source.backup is None or source.backup.location.tier is Tier.HOST


def _number(source: Source) -> int:
    if source.backup is not None:
        return source_of_slot(source.backup.location.slot)
    if source.block is None:
        raise InvariantError("a source of KV is neither a block nor a backup")
    return source.block


def adopt(loop: Loop, seq_id: SeqId, blocks: Seq[BlockId], num_computed: int, now: float) -> bool:
    """Resume a waiting request from KV in owned ``blocks``; one reference to each becomes the request's.

    Args:
        loop: At a boundary.
        seq_id: Of the request.
        blocks: Blocks of its leading tokens.
        num_computed: Tokens whose KV they hold: fewer than its known tokens.
        now: Monotonic seconds.

    Returns:
        Whether it runs. False, with nothing changed, if it has ended or does not wait, or ``max_num_seqs`` are running.
    """
    state = loop.state
    seq = state.sequences.get(seq_id)
    if seq is None or seq.status is not Status.WAITING or len(state.running) >= state.config.max_num_seqs:
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
    """Blocks of a new ledger that are held for handed-over requests; several requests may share some.

    Args:
        ledger: In which they are free.
        rows: The blocks of each request, by a number of the caller's.
    """

    def __init__(self, ledger: BlockLedger, rows: Mapping[int, Seq[BlockId]]) -> None:
        self._ledger = ledger
        self._rows = {number: tuple(row) for number, row in rows.items()}
        self._counts = Counter(block for row in self._rows.values() for block in row)
        for block in self._counts:
            ledger.reserve(block)
        ledger.commit_load(self._counts)

    def __len__(self) -> int:
        """Requests whose blocks are held."""
        return len(self._rows)

    @property
    def table(self) -> list[BlockId]:
        """The held blocks, each once: one reference."""
        return list(self._counts)

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
