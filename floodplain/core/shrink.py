"""Plans how a KV pool shrinks: which quanta are unmapped, and which blocks must move first. Pure.

``plan_shrink`` reserves destinations and retires free and cached blocks; the memory floor copies the moves and unmaps
the pages; ``commit_shrink`` transfers the references, ``abort_shrink`` undoes everything.

Law: a pool with u used blocks can shrink to ceil(u / quantum_blocks) quanta, as long as no copy is in flight. Blocks
that a copy reads or writes cannot move; their quanta stay, and the plan has the size that is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId

_IDLE = frozenset({BlockState.FREE, BlockState.CACHED})


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """One prepared shrink.

    Attributes:
        quanta: Quanta whose pages are unmapped once the moves are done.
        moves: (source, destination) blocks, sources inside ``quanta``, destinations outside.
        retired: Blocks of ``quanta`` that were free or cached and are out of use already.
        num_blocks: Blocks that the pool will have afterwards.
    """

    quanta: tuple[int, ...]
    moves: tuple[tuple[BlockId, BlockId], ...]
    retired: tuple[BlockId, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Quantum:
    """A quantum with memory: its blocks with memory, its used blocks, and whether a copy touches one."""

    index: int
    num_blocks: int
    num_used: int
    is_fixed: bool


def plan_shrink(ledger: BlockLedger, target_blocks: int) -> ShrinkPlan:
    """Prepare to shrink ``ledger`` to the fewest whole quanta that hold ``target_blocks`` and all used blocks.

    The ledger is at an iteration boundary: no step reads its blocks. Destinations are reserved, and blocks retired.
    """
    quanta = _survey(ledger)
    kept = _choose_kept(quanta, max(target_blocks, sum(q.num_used for q in quanta)))
    gone = [q for q in quanta if q.index not in kept]
    idle, sources = _split(ledger, gone)
    destinations = _choose_destinations(ledger, [q for q in quanta if q.index in kept], len(sources))
    for block in destinations:
        ledger.reserve(block)
    for block in idle:
        ledger.retire(block)
    num_left = sum(q.num_blocks for q in quanta if q.index in kept)
    moves = tuple(zip(sources, destinations, strict=True))
    return ShrinkPlan(tuple(q.index for q in gone), moves, tuple(idle), num_left)


def commit_shrink(ledger: BlockLedger, plan: ShrinkPlan) -> dict[BlockId, BlockId]:
    """Transfer references after the moves were copied, and retire the sources.

    Returns old block to new block: every block table with the old one must be rewritten before the next step.
    """
    for source, destination in plan.moves:
        ledger.move(source, destination)
        ledger.retire(source)
    return dict(plan.moves)


def abort_shrink(ledger: BlockLedger, plan: ShrinkPlan) -> None:
    """Undo a plan after a failed copy; cached prefixes that it dropped stay dropped."""
    ledger.abort_load(destination for _, destination in plan.moves)
    ledger.add_memory(plan.retired)


def _survey(ledger: BlockLedger) -> list[_Quantum]:
    size = ledger.quantum_blocks
    found = (ledger.survey(first, size) for first in range(0, ledger.num_indexed_blocks, size))
    return [_Quantum(index, *counts) for index, counts in enumerate(found) if counts[0]]


def _split(ledger: BlockLedger, quanta: Iterable[_Quantum]) -> tuple[list[BlockId], list[BlockId]]:
    """(free and cached blocks, other blocks) of these quanta, without absent ones."""
    idle: list[BlockId] = []
    used: list[BlockId] = []
    for block in _blocks_of(ledger, quanta):
        (idle if ledger.state(block) in _IDLE else used).append(block)
    return idle, used


def _blocks_of(ledger: BlockLedger, quanta: Iterable[_Quantum]) -> Iterator[BlockId]:
    size, num_indexed = ledger.quantum_blocks, ledger.num_indexed_blocks
    for quantum in quanta:
        for index in range(quantum.index * size, min((quantum.index + 1) * size, num_indexed)):
            if ledger.state(BlockId(index)) is not BlockState.ABSENT:
                yield BlockId(index)


def _choose_kept(quanta: list[_Quantum], num_wanted: int) -> set[int]:
    """Quanta to keep: all that a copy touches, then whole ones before partial ones, fullest first."""
    ranked = sorted(quanta, key=lambda q: (not q.is_fixed, -q.num_blocks, -q.num_used, q.index))
    kept: set[int] = set()
    room = 0
    for quantum in ranked:
        if room >= num_wanted and not quantum.is_fixed:
            break
        kept.add(quantum.index)
        room += quantum.num_blocks
    return kept


def _choose_destinations(ledger: BlockLedger, kept: list[_Quantum], num_wanted: int) -> list[BlockId]:
    """Free blocks of the kept quanta, fullest quantum first; then cached ones, least recently used first."""
    if not num_wanted:
        return []
    by_fullness = sorted(kept, key=lambda q: (-q.num_used, q.index))
    free = (block for block in _blocks_of(ledger, by_fullness) if ledger.state(block) is BlockState.FREE)
    chosen = list(islice(free, num_wanted))
    members = {q.index for q in kept}
    cached = (block for block in ledger.cached_blocks() if block // ledger.quantum_blocks in members)
    chosen += islice(cached, num_wanted - len(chosen))
    if len(chosen) < num_wanted:
        raise InvariantError(f"{num_wanted} blocks to move, room for {len(chosen)}")
    return chosen
