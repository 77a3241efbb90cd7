"""The transfer engine of a CUDA device: two streams, Triton gather and scatter, page-locked slots, no thread.

All work of one direction lies on one stream in order: gather, copy, next gather. So staging is never refilled before
its copy has left it, and nothing here waits for the device but ``wait`` and ``close``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.digest import SEED
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import (
    Batch,
    BlockCopy,
    CopyResult,
    Direction,
    LinkUse,
    check_copy,
    judge_inbound,
    split_into_batches,
)

_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy on its stream.

    Attributes:
        copy: What was asked for.
        order: Which of the copy's blocks each digest belongs to.
        digests: Page-locked int64 [n]; valid after
        event: the end of the copy.
        begin: Its begin on the stream, behind the copies before it.
    """

    copy: BlockCopy
    order: np.ndarray
    digests: torch.Tensor
    event: torch.cuda.Event
    begin: torch.cuda.Event


class CudaTransferEngine:
    """See ``TransferEngine``.

    Args:
        pool: Its blocks move; on a CUDA device.
        slots: Where to; page-locked.
        staging_blocks: Blocks that are gathered at a time; each direction has such a buffer on the device.
    """

    def __init__(self, pool: KVPool, slots: SwapSlots, staging_blocks: int) -> None:
        if not slots.words.is_pinned():
            raise InvariantError("slots for CUDA copies must be page-locked")
        self._pool = pool
        self._slots = slots
        self._staging_blocks = staging_blocks
        self._device = pool.device.torch_device
        self._pending: dict[int, _Pending] = {}
        self._uses: list[LinkUse] = []
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        self._staging: dict[Direction, torch.Tensor] = {}
        addresses = [words.data_ptr() for words in pool.words]
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def start(self) -> CudaTransferEngine:
        """Make streams and staging; returns the engine."""
        shape = (self._staging_blocks, *self._slots.words.shape[1:])
        self._streams = {d: torch.cuda.Stream(self._device) for d in Direction}  # type: ignore[no-untyped-call]
        self._staging = {d: torch.empty(shape, dtype=torch.int32, device=self._device) for d in Direction}
        return self

    def close(self) -> None:
        """See ``TransferEngine``."""
        for stream in self._streams.values():
            stream.synchronize()
        self._pending.clear()
        self._staging.clear()

    @property
    def num_in_flight(self) -> int:
        """See ``TransferEngine``."""
        return len(self._pending)

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        """See ``TransferEngine``: the copy waits for what is on the current stream now."""
        check_copy(copy, self._pool, self._slots)
        stream = self._streams[copy.direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if copy.direction is Direction.OUTBOUND:
            self._slots.digests[list(copy.slots)] = EMPTY_DIGEST
        batches = list(split_into_batches(copy, self._staging_blocks))
        digests = torch.empty(len(copy.blocks), dtype=torch.int64, pin_memory=True)
        begin, event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            begin.record(stream)
            found = torch.full(digests.shape, SEED, dtype=torch.int64, device=self._device)
            for index, batch in enumerate(batches):
                self._enqueue(copy.direction, batch, found[index * self._staging_blocks :][: len(batch.order)])
            digests.copy_(found, non_blocking=True)
            event.record(stream)
        order = np.concatenate([batch.order for batch in batches])
        self._pending[transfer_id] = _Pending(copy, order, digests, event, begin)

    def poll(self) -> list[CopyResult]:
        """See ``TransferEngine``."""
        done = [t for t, pending in self._pending.items() if pending.event.query()]  # type: ignore[no-untyped-call]
        return [self._finish(transfer_id, self._pending.pop(transfer_id)) for transfer_id in done]

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``TransferEngine``. CUDA has no wait with a time limit, nor for the first of two events: it polls."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (results := self.poll()) and self._pending:
            if end_s is not None and time.monotonic() >= end_s:
                break
            time.sleep(_POLL_S)
        return results

    def take_link_uses(self) -> list[LinkUse]:
        """See ``TransferEngine``."""
        uses, self._uses = self._uses, []
        return uses

    def _enqueue(self, direction: Direction, batch: Batch, digests: torch.Tensor) -> None:
        """Put one filling of staging on the current stream.

        Memory that torch hands out under a stream is reused in that stream's order, and page-locked memory only after
        its copies: so the temporaries here may be dropped at once.
        """
        from floodplain.memory.triton_copy import gather, scatter

        staging = self._staging[direction]
        blocks = torch.from_numpy(batch.blocks).pin_memory().to(self._device, non_blocking=True)
        if direction is Direction.OUTBOUND:
            gather(self._bases, blocks, staging, digests)
        for row, slot, count in batch.runs:
            near, far = staging[row : row + count], self._slots.part(slot, count)
            target, source = (far, near) if direction is Direction.OUTBOUND else (near, far)
            target.copy_(source, non_blocking=True)
        if direction is Direction.INBOUND:
            scatter(self._bases, blocks, staging, digests)

    def _finish(self, transfer_id: int, pending: _Pending) -> CopyResult:
        copy = pending.copy
        duration_s = pending.begin.elapsed_time(pending.event) / 1e3
        self._uses.append(LinkUse(copy.direction, 1, len(copy.blocks), duration_s))
        num_bytes = len(copy.blocks) * self._pool.layout.block_bytes
        slots, found = list(copy.slots), np.empty(len(copy.slots), dtype=np.int64)
        found[pending.order] = pending.digests.numpy()
        if copy.direction is Direction.INBOUND:
            return judge_inbound(transfer_id, num_bytes, self._slots.digests[slots], found)
        self._slots.digests[slots] = found
        return CopyResult(transfer_id, True, num_bytes, tuple(found.tolist()))
