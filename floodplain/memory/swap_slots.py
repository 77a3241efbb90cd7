"""Where blocks go that leave the pool: block-sized slots, here a bounded buffer of them in host memory.

Which slot is whose is the business of ``core.tiers.SlotLedger``; here are the bytes, and the digest of each slot.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.tiers import Tier
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.page_lock import lock_pages, unlock_pages
from floodplain.memory.runs import find_runs

EMPTY_DIGEST = 0
"""Of a slot that holds nothing whole. Should a block have this digest by chance, its restore is refused: a miss."""


class SlotMemory(Protocol):
    """The bytes of slots, each with room for one block.

    Attributes:
        layout: Shape of a block.
    """

    layout: KVLayout

    def part(self, first: int, count: int) -> torch.Tensor:
        """Adjacent slots as 32-bit words: [count, num_layers, layer_block_words]."""

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Where each of these slots (int64 [n]) begins in this process: uint64 [n]."""


class Slots(SlotMemory, Protocol):
    """Slots of one tier, each with room for one block of all layers.

    Attributes:
        tier: Where they are.
        num_slots: Slots that can ever be; they are numbered from 0.
        digests: The digest of each slot, taken where its block was gathered: int64 [num_slots].
    """

    tier: Tier
    num_slots: int
    digests: np.ndarray

    def digests_of(self, layers: range | None) -> np.ndarray:
        """The same for a range of layers (None: all), for slots that were written by that range: int64 [num_slots].

        Each call returns the same array.
        """

    def forget_digests(self, slots: np.ndarray, layers: range | None) -> None:
        """These layers (None: all) of these slots (int64 [n]) are about to be written: what covers any is empty."""

    def use(self, slots: np.ndarray) -> AbstractContextManager[np.ndarray]:
        """Keep memory where it is for a while: which of these slots (int64 [n]) have any, bool [n].

        Whoever copies does it in here: touching memory that is not there would end the process.
        """

    def check(self, slots: Iterable[int]) -> None:
        """Refuse numbers of slots that can never be.

        Raises:
            InvariantError: There is one.
        """

    def close(self) -> None:
        """Give the memory back, once no copy uses it any more. Safe to call twice."""


class DigestedSlots:
    """The digests of ``Slots``, of whole blocks and of ranges of layers. Each covers what one copy wrote.

    Args:
        layout: Shape of the cache.
        num_slots: Slots that can ever be.
    """

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.digests = np.full(num_slots, EMPTY_DIGEST, dtype=np.int64)
        """See ``Slots``."""
        self._parts: dict[range, np.ndarray] = {}

    def digests_of(self, layers: range | None) -> np.ndarray:
        """See ``Slots.digests_of``."""
        if layers is None:
            return self.digests
        return self._parts.setdefault(layers, np.full(self.num_slots, EMPTY_DIGEST, dtype=np.int64))

    def forget_digests(self, slots: np.ndarray, layers: range | None) -> None:
        """See ``Slots.forget_digests``."""
        self.digests[slots] = EMPTY_DIGEST
        for part, digests in list(self._parts.items()):
            if layers is None or (part.start < layers.stop and layers.start < part.stop):
                digests[slots] = EMPTY_DIGEST


class SwapSlots(DigestedSlots):
    """A fixed number of slots, each with room for one block of all layers.

    A slot takes memory when it is first written, unless the buffer is page-locked, and until it is discarded.

    Args:
        layout: Shape of the cache.
        num_slots: How many.
        is_pinned: Whether the buffer is page-locked, for copies from and to a CUDA device.

    Raises:
        UserError: The system does not give, or lock, that much memory.
    """

    tier = Tier.HOST

    def __init__(self, layout: KVLayout, num_slots: int, *, is_pinned: bool = False) -> None:
        super().__init__(layout, num_slots)
        shape = (num_slots, layout.num_layers, layout.layer_block_words)
        self._memory = _map_private(num_slots * layout.block_bytes)
        self.words = torch.frombuffer(self._memory, dtype=torch.int32, count=math.prod(shape)).view(shape)
        """The bytes as 32-bit words: [num_slots, num_layers, layer_block_words]."""
        self._is_locked = False
        if is_pinned:
            lock_pages(self.words, "lower --swap-memory")
            self._is_locked = True

    def part(self, first: int, count: int) -> torch.Tensor:
        """See ``SlotMemory.part``."""
        return self.words[first : first + count]

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """See ``SlotMemory.addresses``."""
        return self.words.data_ptr() + slots.astype(np.uint64) * np.uint64(self.layout.block_bytes)

    def use(self, slots: np.ndarray) -> AbstractContextManager[np.ndarray]:
        """See ``Slots.use``: all of them."""
        return nullcontext(np.ones(len(slots), dtype=np.bool_))

    def discard(self, slots: Sequence[int]) -> bool:
        """Give the memory of slots back to the system until they are written; whether any could go. They are empty.

        No copy may read or write them. Of a system page that other slots share, nothing goes.
        """
        self.forget_digests(np.array(slots, dtype=np.int64), None)
        if self._is_locked:
            return False
        block_bytes, page_bytes = self.layout.block_bytes, mmap.PAGESIZE
        for first, count in find_runs(sorted(slots)):
            begin = -(-first * block_bytes // page_bytes) * page_bytes
            end = (first + count) * block_bytes // page_bytes * page_bytes
            if begin < end:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return True

    def check(self, slots: Iterable[int]) -> None:
        """See ``Slots.check``."""
        check_slots(slots, self.num_slots)

    def close(self) -> None:
        """Unlock the pages, once no copy uses them any more. Safe to call twice."""
        if self._is_locked:
            self._is_locked = False
            unlock_pages(self.words)


def _map_private(num_bytes: int) -> mmap.mmap:
    """Memory that is there when it is written, at the start of a system page."""
    try:
        return mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(f"the system gives no {num_bytes} bytes for swap space: lower --swap-memory") from error


def check_slots(slots: Iterable[int], num_slots: int) -> None:
    """Refuse numbers that no slot has.

    Raises:
        InvariantError: There is one.
    """
    absent = [slot for slot in slots if not 0 <= slot < num_slots]
    if absent:
        raise InvariantError(f"slots {absent[:8]} of {num_slots}")
