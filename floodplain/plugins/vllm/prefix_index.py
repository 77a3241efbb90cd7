"""Caches how much of each waiting request's prefix is on the device, until a block changes.

Blocks are looked up once for all requests that begin alike, and again only if one of their blocks was evicted, or was
taken or freed by its only holder, or if the first missing block has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from floodplain.core.request import SeqId


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks of a request that are on the device; ``num_shared`` of them other requests or copies hold."""

    num_blocks: int = 0
    num_shared: int = 0


NOTHING = Found()


class _Run:
    """Consecutive blocks on the device, and the run that they follow."""

    __slots__ = ("blocks", "children", "end", "found", "parent", "readers")

    def __init__(self, parent: _Run | None, blocks: list[Any], end: Hashable) -> None:
        self.parent, self.blocks, self.end = parent, blocks, end
        before: Found = NOTHING if parent is None else parent.found
        num_shared = sum(block.ref_cnt > 0 for block in blocks)
        self.found: Found = Found(before.num_blocks + len(blocks), before.num_shared + num_shared)
        self.children: set[_Run] = set()
        self.readers: set[SeqId] = set()


@dataclass(frozen=True, slots=True)
class _Answer:
    most: int
    run: _Run | None
    missing: Hashable


class PrefixIndex:
    """Finds the prefixes of requests, and keeps one answer for each.

    ``find`` returns the block (``ref_cnt``, ``block_id``) with a content, by the hash of all content up to its end;
    None if it is not on the device.
    """

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self._find = find
        self._answers: dict[SeqId, _Answer] = {}
        self._runs: dict[Hashable, _Run] = {}  # by the hash of their last block
        self._runs_at: dict[Hashable, list[_Run]] = {}  # by block id
        self._missed_by: dict[Hashable, set[SeqId]] = {}
        self._forgotten: set[SeqId] = set()

    def find(self, seq_id: SeqId, hashes: Sequence[Any], most: int) -> Found:
        """Return the leading blocks of a request, at most ``most``, that are on the device now.

        ``hashes`` are those of its full blocks, from the first on; only more can follow.
        """
        answer = self._answers.get(seq_id)
        if answer is None or answer.most != most:
            answer = self._look_up(seq_id, hashes, most)
        return NOTHING if answer.run is None else answer.run.found

    def keep_only(self, seq_ids: Set[SeqId]) -> None:
        """Forget the answers for all other requests."""
        for seq_id in self._answers.keys() - seq_ids:
            self._forget(seq_id)

    def take_forgotten(self) -> set[SeqId]:
        """Return requests whose answer was forgotten since the last call, because it may have changed."""
        forgotten, self._forgotten = self._forgotten, set()
        return forgotten

    # -- what changes ----------------------------------------------------------------------------------------------

    def note_held(self, blocks: Iterable[Any]) -> None:
        """Record that the reference counts of these blocks may have changed."""
        if self._runs_at:
            for block in blocks:
                if block.ref_cnt <= 1 and block.block_id in self._runs_at:
                    self.note_evicted(block)

    def note_evicted(self, block: Any) -> None:
        """Record that a block's content may change from now on."""
        for run in self._runs_at.get(block.block_id, [])[:]:
            self._drop(run)

    def note_cached(self, block_hash: Hashable) -> None:
        """Record that a content is on the device from now on."""
        for seq_id in tuple(self._missed_by.get(block_hash, ())):
            self._forget(seq_id)

    def note_reset(self) -> None:
        """Record that no content is on the device any more."""
        self.keep_only(frozenset())

    # -- runs ------------------------------------------------------------------------------------------------------

    def _look_up(self, seq_id: SeqId, hashes: Sequence[Any], most: int) -> _Answer:
        if seq_id in self._answers:
            self._forget(seq_id)
        parent = self._longest_known(hashes, most)
        first = 0 if parent is None else parent.found.num_blocks
        blocks: list[Any] = []
        while first + len(blocks) < most and (block := self._find(hashes[first + len(blocks)])) is not None:
            blocks.append(block)
        end = first + len(blocks)
        run = self._begin(parent, blocks, hashes[end - 1]) if blocks else parent
        missing = hashes[end] if end < most else None
        if run is not None:
            run.readers.add(seq_id)
        if missing is not None:
            self._missed_by.setdefault(missing, set()).add(seq_id)
        answer = self._answers[seq_id] = _Answer(most, run, missing)
        return answer

    def _longest_known(self, hashes: Sequence[Any], most: int) -> _Run | None:
        runs = self._runs
        return next((runs[hashes[i]] for i in range(most - 1, -1, -1) if hashes[i] in runs), None) if runs else None

    def _begin(self, parent: _Run | None, blocks: list[Any], end: Hashable) -> _Run:
        run = self._runs[end] = _Run(parent, blocks, end)
        if parent is not None:
            parent.children.add(run)
        for block in blocks:
            self._runs_at.setdefault(block.block_id, []).append(run)
        return run

    def _drop(self, run: _Run) -> None:
        """Forget a run that may be wrong, and all answers that depend on it."""
        for child in tuple(run.children):
            self._drop(child)
        for seq_id in tuple(run.readers):
            self._forget(seq_id)
        if self._runs.get(run.end) is run:
            self._end_unread(run)

    def _forget(self, seq_id: SeqId) -> None:
        answer = self._answers.pop(seq_id)
        self._forgotten.add(seq_id)
        if answer.missing is not None:
            missed_by = self._missed_by[answer.missing]
            missed_by.remove(seq_id)
            if not missed_by:
                del self._missed_by[answer.missing]
        run = answer.run
        if run is not None:
            run.readers.remove(seq_id)
            self._end_unread(run)

    def _end_unread(self, run: _Run | None) -> None:
        """End a run without readers or children, and then the runs that it follows if they have none."""
        while run is not None and not run.readers and not run.children:
            self._end(run)
            run = run.parent

    def _end(self, run: _Run) -> None:
        del self._runs[run.end]
        if run.parent is not None:
            run.parent.children.discard(run)
        for block in run.blocks:
            runs = self._runs_at[block.block_id]
            runs.remove(run)
            if not runs:
                del self._runs_at[block.block_id]
