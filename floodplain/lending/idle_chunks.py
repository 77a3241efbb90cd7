"""Decides which idle chunks of slots a borrower returns, and how many chunks it wants. Pure.

It wants as many chunks as possible until one was idle. From then on it wants what it has, and more if there is too
little room. It returns a chunk only if a whole chunk's room stays, and wants more only if less than half of one is
left. So under constant use it neither returns nor requests chunks, and leases do not oscillate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from floodplain.leases.states import LeaseId

CHECKS_PER_IDLE = 8
"""Checks in the time after which a chunk is idle: each costs a walk over the taken slots."""
MOST_MORE = 4
"""The most chunks that are wanted beyond the present ones at a time."""


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """The use of a chunk at one moment: the copies that ever began there, and its slots with needed content."""

    num_copies: int
    num_kept: int


class IdleChunks:
    """Tracks the use of chunks, and chooses how many to have.

    Args:
        idle_s: Seconds without use after which a chunk is returned; 0 keeps all.
        chunk_slots: Slots of a chunk.
        max_chunks: The most chunks that there can be.

    Attributes:
        num_wanted: How many chunks there should be.
    """

    def __init__(self, idle_s: float, chunk_slots: int, max_chunks: int) -> None:
        self.num_wanted = max_chunks
        self._idle_s, self._chunk_slots, self._max_chunks = idle_s, chunk_slots, max_chunks
        self._used: dict[LeaseId, tuple[int, float]] = {}  # the copies at its last noticed use, and when that was
        self._next_check_s = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is time to check the chunks."""
        return self._idle_s > 0 and now >= self._next_check_s

    def choose(self, now: float, chunks: Mapping[LeaseId, ChunkUse], is_needed: bool) -> list[LeaseId]:
        """Return the leases of idle chunks to return now; all their slots can be given up at once.

        ``chunks`` are those that are not recalled, by lease: a chunk's number is used again, with other memory. If any
        request needs swap space (``is_needed``), room for one more chunk's slots stays.
        """
        self._next_check_s = now + self._idle_s / CHECKS_PER_IDLE
        self._note_uses(now, chunks)
        idle = [lease_id for lease_id in chunks if now - self._used[lease_id][1] >= self._idle_s]
        num_free = sum(self._chunk_slots - use.num_kept for use in chunks.values())
        num_spare = num_free // self._chunk_slots - is_needed
        returned = sorted(idle, key=lambda lease_id: self._used[lease_id][1])[: max(0, num_spare)]
        if returned:
            self.num_wanted = len(chunks) - len(returned)
        return returned

    def note_room(self, num_chunks: int, num_free: int, is_needed: bool) -> None:
        """Want more chunks if less than half a chunk's room is free in the present ones, and needed."""
        if is_needed and 2 * num_free < self._chunk_slots:
            more = max(1, min(num_chunks, MOST_MORE))
            self.num_wanted = max(self.num_wanted, min(self._max_chunks, num_chunks + more))

    def _note_uses(self, now: float, chunks: Mapping[LeaseId, ChunkUse]) -> None:
        before, self._used = self._used, {}
        for lease_id, use in chunks.items():
            num_copies, used_s = before.get(lease_id, (-1, now))
            is_used = bool(use.num_kept) or use.num_copies != num_copies
            self._used[lease_id] = use.num_copies, now if is_used else used_s
