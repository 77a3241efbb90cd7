"""How a KV pool gives memory back: which quanta go, and which blocks must move first. Pure.

prepare (``plan_shrink``) reserves destinations and retires what is free; the memory floor copies the moves and unmaps
the pages; ``commit_shrink`` hands over the references, ``abort_shrink`` undoes everything.

Law: a pool with u used blocks can shrink to ceil(u / quantum_blocks) quanta, as long as no copy is in flight. Blocks
that a copy reads or writes cannot move; their quanta stay, and the plan says what it got.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from floodplain.core.blocks import BlockLedger, BlockState
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """One prepared shrink.

    Attributes:
        quanta: Quanta whose pages go once the moves are done.
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
    index: int
    blocks: tuple[BlockId, ...]
    used: tuple[BlockId, ...]
    is_fixed: bool


def plan_shrink(ledger: BlockLedger, target_blocks: int) -> ShrinkPlan:
    """Prepare to shrink ``ledger`` to the fewest whole quanta that hold ``target_blocks`` and all used blocks.

    Args:
        ledger: At an iteration boundary: no step reads its blocks. Changed: destinations are reserved, blocks retired.
        target_blocks: Wanted size; never undercut.
    """
    quanta = _survey(ledger)
    kept = _choose_kept(quanta, max(target_blocks, sum(len(q.used) for q in quanta)))
    gone = [q for q in quanta if q.index not in kept]
    sources = [block for q in gone for block in q.used]
    destinations = _choose_destinations(ledger, [q for q in quanta if q.index in kept], len(sources))
    for block in destinations:
        ledger.reserve(block)
    retired = tuple(block for q in gone for block in q.blocks if block not in set(q.used))
    for block in retired:
        ledger.retire(block)
    num_left = sum(len(q.blocks) for q in quanta if q.index in kept)
    moves = tuple(zip(sources, destinations, strict=True))
    return ShrinkPlan(tuple(q.index for q in gone), moves, retired, num_left)


def commit_shrink(ledger: BlockLedger, plan: ShrinkPlan) -> dict[BlockId, BlockId]:
    """The moves are copied: hand over references, retire the sources.

    Returns:
        Old block to new block: every block table that holds the old one must be rewritten before the next step.
    """
    for source, destination in plan.moves:
        ledger.move(source, destination)
        ledger.retire(source)
    return dict(plan.moves)


def abort_shrink(ledger: BlockLedger, plan: ShrinkPlan) -> None:
    """A copy failed: the pool is as it was, but for cached prefixes that were dropped."""
    ledger.abort_load(destination for _, destination in plan.moves)
    ledger.add_memory(plan.retired)


def _survey(ledger: BlockLedger) -> list[_Quantum]:
    blocks: dict[int, list[BlockId]] = defaultdict(list)
    for index in range(ledger.num_indexed_blocks):
        if ledger.state(BlockId(index)) is not BlockState.ABSENT:
            blocks[index // ledger.quantum_blocks].append(BlockId(index))
    return [_survey_quantum(ledger, index, tuple(members)) for index, members in sorted(blocks.items())]


def _survey_quantum(ledger: BlockLedger, index: int, blocks: tuple[BlockId, ...]) -> _Quantum:
    states = {block: ledger.state(block) for block in blocks}
    used = tuple(b for b, s in states.items() if s not in (BlockState.FREE, BlockState.CACHED))
    is_fixed = any(states[b] is not BlockState.OWNED or ledger.is_pinned(b) for b in used)
    return _Quantum(index, blocks, used, is_fixed)


def _choose_kept(quanta: list[_Quantum], num_wanted: int) -> set[int]:
    """Quanta that a copy touches must stay; then whole ones before partial ones, fullest first."""
    ranked = sorted(quanta, key=lambda q: (not q.is_fixed, -len(q.blocks), -len(q.used), q.index))
    kept: set[int] = set()
    room = 0
    for quantum in ranked:
        if room >= num_wanted and not quantum.is_fixed:
            break
        kept.add(quantum.index)
        room += len(quantum.blocks)
    return kept


def _choose_destinations(ledger: BlockLedger, kept: list[_Quantum], num_wanted: int) -> list[BlockId]:
    """Free blocks of the kept quanta, fullest quantum first; then cached ones, least recently used first."""
    by_fullness = sorted(kept, key=lambda q: (-len(q.used), q.index))
    free = [b for q in by_fullness for b in q.blocks if ledger.state(b) is BlockState.FREE]
    members = {b for q in kept for b in q.blocks}
    chosen = (free + [b for b in ledger.cached_blocks() if b in members])[:num_wanted]
    if len(chosen) < num_wanted:
        raise InvariantError(f"{num_wanted} blocks to move, room for {len(chosen)}")
    return chosen
