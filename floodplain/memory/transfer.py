"""Copies of scattered blocks out of the KV pool and back: gather into staging, one large copy, scatter.

Staging and slots are block-major, [blocks, layers, words of a layer's part]: a block is one piece of memory with one
digest, any subset of a sequence's blocks can be swapped in alone, and blocks for adjacent slots are one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots


class BlockStore(Protocol):
    """Blocks that are copied to and from slots: the KV pool, or slots of another tier.

    Attributes:
        layout: Shape of the cache.
    """

    layout: KVLayout

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """A tensor for each layer, int32 [blocks, words of a layer's part of a block]; a new tuple if one changes."""

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise unless blocks have memory: a copy of memory that is not there would crash the process.

        Raises:
            InvariantError: A block has no memory.
        """


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy these blocks to (OUTBOUND) or from (INBOUND) these slots, pair by pair.

    Attributes:
        direction: Which way.
        blocks: Blocks of the store.
        slots: The slot of each block.
    """

    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a copy ended.

    Attributes:
        transfer_id: The id that was submitted.
        lost: Places in ``BlockCopy.blocks`` of the blocks that did not arrive as they left, ascending. The bytes at
            their destinations are unspecified.
        num_bytes: Bytes that went over the link.
        digests: Of each block as it was copied, in the order of ``BlockCopy.blocks``.
        problem: Why blocks are lost.
    """

    transfer_id: int
    lost: tuple[int, ...]
    num_bytes: int
    digests: tuple[int, ...] = ()
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every block arrived as it left."""
        return not self.lost


class Pacer(Protocol):
    """A modelled link that copies wait for."""

    def book(self, direction: Direction, sizes_bytes: Sequence[int]) -> tuple[float, float]:
        """Book copies of these sizes one after another, behind all that is booked already.

        Returns:
            When the last byte arrives, on the monotonic clock, and the seconds since the first one left.
        """


class TransferEngine(Protocol):
    """Runs copies beside compute. One thread submits and polls.

    Copies of one direction run in the order in which they were submitted; the two directions overlap. Between
    ``submit`` and its result, the blocks of an outbound copy must not be written, and those of an inbound copy and the
    slots of either must not be touched.
    """

    @property
    def num_in_flight(self) -> int:
        """Copies whose result has not been taken yet."""

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """Begin a copy and return at once. An outbound copy sees what earlier steps wrote.

        Raises:
            InvariantError: A block has no memory, a slot does not exist, or one of them is named twice.
        """

    def poll(self) -> list[CopyResult]:
        """Take the results that are there, without waiting."""

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """Take results, waiting for the first one; empty if nothing is in flight or the time is over."""

    def take_copy_times(self) -> list[CopyTime]:
        """How long the link was busy with the copies whose results were taken since the last call."""

    def close(self) -> None:
        """Let the copies in flight end, then stop. Their results are lost."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One filling of the staging buffer: a part of a copy, its slots ascending.

    Attributes:
        order: Index in ``BlockCopy.blocks`` of each row.
        blocks: Block of each row.
        slots: Slot of each row.
        runs: (row, first slot, count): each is one copy over the link.
    """

    order: np.ndarray
    blocks: np.ndarray
    slots: np.ndarray
    runs: tuple[tuple[int, int, int], ...]


def split_into_batches(copy: BlockCopy, staging_blocks: int) -> Iterator[Batch]:
    """Cut a copy into fillings of a staging buffer of ``staging_blocks``, adjacent slots together."""
    blocks, slots = np.asarray(copy.blocks, dtype=np.int64), np.asarray(copy.slots, dtype=np.int64)
    by_slot = np.argsort(slots)
    for start in range(0, len(slots), staging_blocks):
        order = by_slot[start : start + staging_blocks]
        runs, row = [], 0
        for first, count in find_runs(slots[order]):
            runs.append((row, first, count))
            row += count
        yield Batch(order, blocks[order], slots[order], tuple(runs))


def check_copy(copy: BlockCopy, pool: BlockStore, slots: Slots) -> None:
    """Raise unless a copy names blocks and slots that exist, each once.

    Raises:
        InvariantError: As in ``TransferEngine.submit``.
    """
    pool.expect_backed(copy.blocks)
    if len(copy.blocks) != len(copy.slots) or not copy.blocks:
        raise InvariantError(f"a copy of {len(copy.blocks)} blocks and {len(copy.slots)} slots")
    if len({*copy.blocks}) < len(copy.blocks) or len({*copy.slots}) < len(copy.slots):
        raise InvariantError("a block or a slot occurs twice in a copy")
    slots.check(copy.slots)


def judge_outbound(transfer_id: int, num_bytes: int, found: np.ndarray) -> CopyResult:
    """Result of an outbound copy: a block whose slot had no memory has ``EMPTY_DIGEST``, and is lost."""
    lost = _places(found == EMPTY_DIGEST)
    return CopyResult(transfer_id, lost, num_bytes, tuple(found.tolist()), "a slot went away" if lost else None)


def judge_inbound(transfer_id: int, num_bytes: int, expected: np.ndarray, found: np.ndarray) -> CopyResult:
    """Result of an inbound copy: a block is lost if its slot was empty, or its digest is not the stored one."""
    is_empty = expected == EMPTY_DIGEST
    lost, problem = _places(is_empty | (expected != found)), None
    if lost:
        problem = "a slot holds no whole block" if is_empty.any() else f"{len(lost)} blocks have another digest"
    return CopyResult(transfer_id, lost, num_bytes, tuple(found.tolist()), problem)


def _places(is_lost: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(is_lost).tolist())
