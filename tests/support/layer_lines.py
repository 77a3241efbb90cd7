"""Lines that copy as late, or as early, as they may: a missing order fails every run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from floodplain.memory.host.layer_line import HostClock
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_line import LineStats, Ticket
from floodplain.memory.layer_slots import LayerSlots

Job = Callable[[], None]


class OrderedLine(HostClock):
    """See ``LayerLine``: copies run in their order, in the thread that waits for them, or at once unless ``is_late``.

    With a ``pool``, a load first overwrites its blocks in a place: reads of anything not loaded fail.
    """

    def __init__(self, num_layers: int, *, is_late: bool = True) -> None:
        self.homes: list[torch.Tensor | None] = [None] * num_layers
        self.nears: list[torch.Tensor | None] = [None] * num_layers
        self.num_waits = 0
        self.is_late = is_late
        self.pool: KVPool | None = None
        self._jobs: list[tuple[Ticket, Job]] = []
        self._num_submitted = 0
        self._loaded_bytes = self._written_bytes = self._near_bytes = 0

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        self.homes[layer], self.nears[layer] = home, near

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        def job() -> None:
            near = self.nears[layer]
            if self.pool is not None:
                num_blocks = self.pool.num_blocks  # the lowest ones, except holes: those are not overwritten
                blocks = [block for block in range(num_blocks) if self.pool.is_backed(block)]
                place.view(torch.int16)[blocks] = -1
            _copy(place, self.homes[layer] if near is None else near, offsets, piece_bytes)
            self._loaded_bytes += len(offsets) * piece_bytes
            self._near_bytes += 0 if near is None else len(offsets) * piece_bytes

        return self._submit(job)

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        def job() -> None:
            for copy in (self.homes[layer], self.nears[layer]):
                if copy is not None:
                    _copy(copy, place, offsets, piece_bytes)
            self._written_bytes += len(offsets) * piece_bytes

        return self._submit(job)

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        def job() -> None:
            near = self.nears[layer]
            if near is not None:
                _copy(near, self.homes[layer], offsets, piece_bytes)

        return self._submit(job)

    def wait(self, ticket: Ticket) -> None:
        self.num_waits += 1
        while self._jobs and self._jobs[0][0] <= ticket:
            self._jobs.pop(0)[1]()

    def drain(self) -> None:
        self.wait(Ticket(self._num_submitted))

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Ignore pacing: copies take no time."""

    def stats(self) -> LineStats:
        return LineStats(self._loaded_bytes, self._loaded_bytes * 1e-9, self._written_bytes, self._near_bytes)

    def close(self) -> None:
        self._jobs.clear()

    def _submit(self, job: Job) -> Ticket:
        self._num_submitted += 1
        ticket = Ticket(self._num_submitted)
        if self.is_late:
            self._jobs.append((ticket, job))
        else:
            job()
        return ticket


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return array


def _copy(to: torch.Tensor, source: torch.Tensor | None, offsets: np.ndarray, piece_bytes: int) -> None:
    assert source is not None
    target, origin = _bytes(to), _bytes(source)
    for offset in offsets.tolist():
        target[offset : offset + piece_bytes] = origin[offset : offset + piece_bytes]


class ForgetfulSlots(LayerSlots):
    """Leaves one part of the protocol out, given by ``fault``; the tests must find it."""

    fault = ""

    def before_layer(self, index: int) -> None:
        if self.fault != "wait":
            super().before_layer(index)

    def settle(self) -> None:
        if self.fault != "settle":
            super().settle()

    def begin_step(self, read_blocks: np.ndarray, written_tokens: np.ndarray) -> None:
        if self.fault == "partly filled":
            full = written_tokens // self._pool.layout.block_tokens
            read_blocks = read_blocks[~np.isin(read_blocks, full)]
        super().begin_step(read_blocks, written_tokens if self.fault != "write" else written_tokens[:0])

    def after_layer(self, index: int) -> None:
        follower = None if self.places.slot_of(index) is None else self.places.follower(index)
        if self.fault == "order" and follower is not None:
            self._load(follower)
        super().after_layer(index)
