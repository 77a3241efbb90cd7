"""Copies on a GPU: ``submit`` enqueues them on the stream of their direction, and the copy thread waits for them.

All work of a direction is on its stream in order: gather into staging, copy, next gather. Memory of a copy's slots is
kept in place from ``submit`` to the end of the copy: memory that must be returned now waits for the copies that are
under way there, and never for the step loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.digest import SEED
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.peer.slots import PeerSlots, SlotStore
from floodplain.memory.runs import find_runs
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots, SwapSlots
from floodplain.memory.transfer import BlockCopy, BlockStore, CopyEngine, Pass, judge_copy


class Wire(Protocol):
    """Copies between rows of staging, int32 [n, num_layers, layer_block_words], and as many adjacent slots."""

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue a copy on the current stream: OUTBOUND copies staging to the slots from ``first`` on."""


class PinnedWire:
    """A ``Wire`` to page-locked memory of the host; raises ``InvariantError`` if the slots are not page-locked."""

    def __init__(self, slots: SwapSlots) -> None:
        if not slots.words.is_pinned():
            raise InvariantError("slots for CUDA copies must be page-locked")
        self._slots = slots

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue a copy between rows of staging and the slots from ``first`` on."""
        far = self._slots.part(first, len(rows))
        target, source = (far, rows) if direction is Direction.OUTBOUND else (rows, far)
        target.copy_(source, non_blocking=True)


class PeerWire:
    """A ``Wire`` to neighbours' memory, kept in place by ``Slots.use``. torch is not used: it would make a context."""

    def __init__(self, slots: PeerSlots, driver: CudaDriver) -> None:
        self._slots = slots
        self._driver = driver

    def copy(self, direction: Direction, rows: torch.Tensor, first: int) -> None:
        """Enqueue copies between rows of staging and slots, one for each chunk that the slots lie in."""
        block_bytes = self._slots.layout.block_bytes
        stream = self._driver.api.CUstream(_current_stream(rows.device))
        near = rows.data_ptr()
        for far, count in self._slots.pieces(first, len(rows)):
            target, source = (far, near) if direction is Direction.OUTBOUND else (near, far)
            self._driver.call(self._driver.api.cuMemcpyDtoDAsync, target, source, count * block_bytes, stream)
            near += count * block_bytes


class End(Protocol):
    """The side of a copy on which its blocks are: it fills staging, or empties it, and adds up digests."""

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """OUTBOUND fills the first rows of staging with these blocks (int64 [n]), INBOUND copies them from there.

        Their digests are added to ``digests``, int64 [n] on the device.
        """


class PoolEnd:
    """An ``End`` at the KV pool, whose scattered blocks a kernel of our own device gathers and scatters."""

    def __init__(self, pool: BlockStore, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._read_addresses()

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """Gather or scatter blocks, and add to digests, on the current stream, in whose order memory is reused."""
        from floodplain.memory.cuda.triton_copy import gather, scatter

        if self._words is not self._pool.words:
            self._read_addresses()
        places = torch.from_numpy(blocks).pin_memory().to(self._device, non_blocking=True)
        run = gather if direction is Direction.OUTBOUND else scatter
        run(self._bases, places, staging, digests)

    def _read_addresses(self) -> None:
        """Read the layers' addresses. ``_words`` is set last: another thread that finds it current uses them."""
        words = self._pool.words
        bases = [one.data_ptr() for one in words]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=self._device)
        self._words = words


class PinnedEnd:
    """An ``End`` at page-locked slots of the host, for copies to and from another tier."""

    def __init__(self, slots: SwapSlots) -> None:
        self._wire = PinnedWire(slots)

    def copy(self, direction: Direction, blocks: np.ndarray, staging: torch.Tensor, digests: torch.Tensor) -> None:
        """Copy slots to or from staging, and add the digests of what passed through staging."""
        from floodplain.memory.cuda.triton_copy import add_digests

        row = 0
        for first, count in find_runs(blocks):
            self._wire.copy(direction.opposite, staging[row : row + count], first)
            row += count
        add_digests(staging[:row], digests)


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@dataclass(frozen=True, slots=True)
class Batch:
    """One filling of the staging buffer: a part of a copy, its slots ascending, with the ``order`` of each in the copy.

    Each of the ``runs`` (row, first slot, count) is one copy over the link.
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


class CudaMark:
    """The end of copies on a CUDA stream; ``digests``, page-locked int64 [n], are valid after it."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event, digests: torch.Tensor) -> None:
        self._begin, self._end, self._digests = begin, end, digests

    def wait(self) -> tuple[np.ndarray, float]:
        """Wait for the copies, without Python's lock; returns their digests and the seconds they took."""
        self._end.synchronize()
        return self._digests.numpy(), self._begin.elapsed_time(self._end) / 1e3


class CudaStream:
    """Copies of one direction on a CUDA stream, between an ``end`` and, through staging and a ``wire``, slots."""

    def __init__(
        self, direction: Direction, device: torch.device, layout: KVLayout, end: End, wire: Wire, staging_blocks: int
    ) -> None:
        self.staging_blocks = staging_blocks
        self._direction, self._device = direction, device
        self._end, self._wire = end, wire
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        shape = (staging_blocks, layout.num_layers, layout.layer_block_words)
        self._staging = torch.empty(shape, dtype=torch.int32, device=device)

    def run(self, batches: Sequence[Batch]) -> CudaMark:
        """Begin to copy behind the work that is on the current stream now, and return at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        num_blocks = sum(len(batch.order) for batch in batches)
        digests = torch.empty(num_blocks, dtype=torch.int64, pin_memory=True)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            begin.record(self._stream)
            found = torch.full((num_blocks,), SEED, dtype=torch.int64, device=self._device)
            row = 0
            for batch in batches:
                self._enqueue(batch, found[row : row + len(batch.order)])
                row += len(batch.order)
            digests.copy_(found, non_blocking=True)
            end.record(self._stream)
        return CudaMark(begin, end, digests)

    def drain(self) -> None:
        """Wait for all copies that were begun."""
        self._stream.synchronize()

    def close(self) -> None:
        """Wait for all copies that were begun, and free staging."""
        self.drain()
        self._staging = torch.empty(0)

    def _enqueue(self, batch: Batch, digests: torch.Tensor) -> None:
        if self._direction is Direction.OUTBOUND:
            self._end.copy(self._direction, batch.blocks, self._staging, digests)
        for row, slot, count in batch.runs:
            self._wire.copy(self._direction, self._staging[row : row + count], slot)
        if self._direction is Direction.INBOUND:
            self._end.copy(self._direction, batch.blocks, self._staging, digests)


@dataclass(frozen=True, slots=True)
class CudaJob:
    """A copy under way, until ``mark``; ``held`` keeps its slots where they are.

    ``order``: which of the copy's blocks each digest belongs to; slots without memory have none. ``expected`` are
    the digests of its slots when it began: int64 [n].
    """

    transfer_id: int
    copy: BlockCopy
    order: np.ndarray
    expected: np.ndarray
    mark: CudaMark | None
    held: ExitStack


class CudaLane:
    """A ``Lane`` that copies on the CUDA stream of its direction."""

    most_jobs: float = 1

    def __init__(self, store: BlockStore, slots: Slots, stream: CudaStream) -> None:
        self._store, self._slots, self._stream = store, slots, stream

    def begin(self, transfer_id: int, copy: BlockCopy) -> CudaJob:
        """Enqueue a copy behind the work that is on the current stream now, and return at once."""
        slots = np.asarray(copy.slots, dtype=np.int64)
        with ExitStack() as held:
            is_there = held.enter_context(self._slots.use(slots))
            expected = self._slots.digests[slots]
            if copy.direction is Direction.OUTBOUND:
                self._slots.digests[slots] = EMPTY_DIGEST
            order, mark = self._enqueue(copy, np.flatnonzero(is_there))
            return CudaJob(transfer_id, copy, order, expected, mark, held.pop_all())

    def finish(self, jobs: Sequence[CudaJob]) -> Pass:
        """Wait for the copy. Its slots' memory is released even if the device is lost: no copy is under way then."""
        (job,) = jobs
        with job.held:
            return self._settle(job)

    def close(self) -> None:
        """Wait for all copies, and free staging."""
        self._stream.close()

    def _enqueue(self, copy: BlockCopy, there: np.ndarray) -> tuple[np.ndarray, CudaMark | None]:
        """Enqueue the blocks at these places of the copy; returns their order on the stream, and the end."""
        if not len(there):
            return there, None
        blocks, slots = (tuple(ids[i] for i in there) for ids in (copy.blocks, copy.slots))
        part = BlockCopy(copy.direction, blocks, slots)
        batches = list(split_into_batches(part, self._stream.staging_blocks))
        try:
            mark = self._stream.run(batches)
        except BaseException:
            self._stream.drain()  # a part may be under way, and the memory is released next
            raise
        return there[np.concatenate([batch.order for batch in batches])], mark

    def _settle(self, job: CudaJob) -> Pass:
        """Wait for a copy, and store the digests of its slots while their memory is kept."""
        copy, time = job.copy, None
        found = np.full(len(copy.blocks), EMPTY_DIGEST, dtype=np.int64)  # of a slot that has no memory any more
        if job.mark is not None:
            found[job.order], duration_s = job.mark.wait()
            time = CopyTime(self._slots.tier, copy.direction, 1, len(job.order), duration_s)
        if copy.direction is Direction.OUTBOUND:
            self._slots.digests[list(copy.slots)] = found
        num_bytes = len(found) * self._store.layout.block_bytes
        result = judge_copy(job.transfer_id, copy.direction, num_bytes, job.expected, found)
        return Pass([(0.0, result)], time)


class CudaTransferEngine(CopyEngine[CudaJob]):
    """A ``CopyEngine`` whose blocks move over a GPU; ``open_stream`` makes the stream of a direction."""

    def __init__(self, store: BlockStore, slots: Slots, open_stream: Callable[[Direction], CudaStream]) -> None:
        super().__init__(store, slots, lambda direction: CudaLane(store, slots, open_stream(direction)))


def open_copies(
    store: BlockStore, device: torch.device, slots: SwapSlots | PeerSlots, staging_blocks: int
) -> CudaTransferEngine:
    """The unstarted engine between slots and a pool on a GPU or a ``SlotStore``.

    ``staging_blocks`` pass through the GPU at a time, in each direction.
    """
    end = PinnedEnd(store.slots) if isinstance(store, SlotStore) else PoolEnd(store, device)
    wire = _open_wire(slots, device)
    return CudaTransferEngine(
        store, slots, lambda direction: CudaStream(direction, device, store.layout, end, wire, staging_blocks)
    )


def _open_wire(slots: SwapSlots | PeerSlots, device: torch.device) -> Wire:
    if isinstance(slots, SwapSlots):
        return PinnedWire(slots)
    return PeerWire(slots, CudaDriver(device.index))
