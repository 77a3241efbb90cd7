"""Slots of swap space, each with room for one block: their bytes and digests. ``core.tiers.SlotLedger`` assigns them.

Exactly the slots' bytes are page-locked here, since torch rounds up to powers of two; with unified addresses kernels of
every device read and write them at the host's address (cudaHostRegisterDefault).
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import show_size
from floodplain.core.tiers import Tier
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.runs import find_runs


def lock_pages(words: torch.Tensor, advice: str) -> None:
    """Lock a host tensor's memory until ``unlock_pages``; ``UserError`` with ``advice`` if the system refuses."""
    if int(_cuda_runtime().cudaHostRegister(words.data_ptr(), words.nbytes, 0)):
        raise UserError(f"the system locks no {show_size(words.nbytes)} of memory: {advice}")


def unlock_pages(words: torch.Tensor) -> None:
    """Undo ``lock_pages``, once no copy uses the memory any more."""
    torch.cuda.check_error(int(_cuda_runtime().cudaHostUnregister(words.data_ptr())))


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


EMPTY_DIGEST = 0
"""Digest of a slot without a whole block. If a block has it by chance, its swap-in is refused: a miss."""


class Slots(ABC):
    """Slots of one tier, numbered from 0, each with room for one block of all layers.

    ``num_slots`` can exist at most. ``digests`` were taken where each block was gathered: int64 [num_slots].
    """

    tier: Tier

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self.layout, self.num_slots = layout, num_slots
        self.digests = np.full(num_slots, EMPTY_DIGEST, dtype=np.int64)

    @abstractmethod
    def part(self, first: int, count: int) -> torch.Tensor:
        """Adjacent slots as 32-bit words: [count, num_layers, layer_block_words]."""

    @abstractmethod
    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Where each of these slots (int64 [n]) begins in this process: uint64 [n]."""

    @abstractmethod
    def use(self, slots: np.ndarray) -> AbstractContextManager[np.ndarray]:
        """Keep memory in place while the context of a copy is open; yields which of these slots have any, bool [n]."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once no copy uses it any more. Safe to call twice."""

    def check(self, slots: Iterable[int]) -> None:
        """Raise ``InvariantError`` unless all numbers are at least 0 and below ``num_slots``."""
        absent = [slot for slot in slots if not 0 <= slot < self.num_slots]
        if absent:
            raise InvariantError(f"slots {absent[:8]} of {self.num_slots}")


class SwapSlots(Slots):
    """Slots in host memory, page-locked for copies of a CUDA device if ``is_pinned``; ``UserError`` without memory.

    A slot takes memory from its first write, or at once if the buffer is page-locked, until it is discarded.
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
        """Adjacent slots as 32-bit words: [count, num_layers, layer_block_words]."""
        return self.words[first : first + count]

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Where each of these slots (int64 [n]) begins in this process: uint64 [n]."""
        return self.words.data_ptr() + slots.astype(np.uint64) * np.uint64(self.layout.block_bytes)

    def use(self, slots: np.ndarray) -> AbstractContextManager[np.ndarray]:
        """Yield True for each of these slots: this memory is never removed."""
        return nullcontext(np.ones(len(slots), dtype=np.bool_))

    def discard(self, slots: Sequence[int]) -> bool:
        """Return the memory of slots without copies to the system, and empty them; False if it is page-locked."""
        self.digests[list(slots)] = EMPTY_DIGEST
        if self._is_locked:
            return False
        block_bytes, page_bytes = self.layout.block_bytes, mmap.PAGESIZE
        for first, count in find_runs(sorted(slots)):
            begin = -(-first * block_bytes // page_bytes) * page_bytes
            end = (first + count) * block_bytes // page_bytes * page_bytes
            if begin < end:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return True

    def close(self) -> None:
        """Unlock the pages, once no copy uses them any more. Safe to call twice."""
        if self._is_locked:
            self._is_locked = False
            unlock_pages(self.words)


def _map_private(num_bytes: int) -> mmap.mmap:
    """Private memory, at the start of a system page, that is allocated when it is written."""
    try:
        return mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(f"the system gives no {show_size(num_bytes)} for swap space: lower --swap-memory") from error
