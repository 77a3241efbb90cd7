"""The ``LayerLine`` of a GPU: a stream for each direction, and events. Submitting never blocks the host.

Events keep the order that a queue keeps on a host: a load waits for the last write from its place and for the last
write to its layer; a write waits for compute submitted before it; compute waits for the copies of a layer's place.

A call of the copy engine takes the host some 5 µs, so it copies long runs or few of them; a kernel, which takes its
share of the multiprocessors, copies scattered pieces at their own addresses. ``benchmarks/gpu`` compares the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.driver import CudaDriver
from floodplain.memory.layer_line import LineStats, Mark, Ticket
from floodplain.memory.runs import find_runs

FEW_RUNS = 4
LONG_RUN_BYTES = 2**19
"""Takes twice as long on a link of 50 GB/s as the call that begins it."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How the pieces of one array of offsets are copied: ``runs`` (first, count), or by a kernel ``ids``, if any."""

    offsets: np.ndarray
    piece_bytes: int
    runs: list[tuple[int, int]]
    ids: torch.Tensor | None = None


def compile_kernel(device: torch.device) -> None:
    """Compile the kernel before the first step, where its seconds would count as the time of a load."""
    from floodplain.memory.cuda.triton_copy import copy_pieces

    words = torch.zeros(32, dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    copy_pieces(words.data_ptr(), words[16:].data_ptr(), first, 16)


class PieceCopier:
    """Copies pieces of layers on one stream, by copy engine or kernel. One for each stream: nothing else runs there.

    The copy engine gets up to ``few_runs`` runs of pieces, and more if their average is at least ``long_run_bytes``.
    """

    def __init__(
        self,
        driver: CudaDriver,
        device: torch.device,
        few_runs: float = FEW_RUNS,
        long_run_bytes: float = LONG_RUN_BYTES,
    ) -> None:
        self._driver, self._device = driver, device
        self._few_runs, self._long_run_bytes = few_runs, long_run_bytes
        self._last: _Pieces | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> None:
        """Enqueue copies on the current stream. Only a step's first layer sorts the pieces that all layers share."""
        if not len(offsets):
            return
        if piece_bytes % 4:
            raise InvariantError(f"pieces of {piece_bytes} bytes are not whole 32-bit words")
        last = self._last
        if last is None or last.offsets is not offsets or last.piece_bytes != piece_bytes:
            last = self._last = self._look_at(offsets, piece_bytes)
        if last.ids is None:
            self._copy_runs(target.data_ptr(), source.data_ptr(), last)
        else:
            from floodplain.memory.cuda.triton_copy import copy_pieces

            copy_pieces(target.data_ptr(), source.data_ptr(), last.ids, piece_bytes // 4)

    def _look_at(self, offsets: np.ndarray, piece_bytes: int) -> _Pieces:
        """Choose runs, or ids for a kernel, which may be dropped at once: torch reuses memory in a stream's order."""
        pieces = np.sort(offsets) // piece_bytes
        num_runs = 1 + int(np.count_nonzero(np.diff(pieces) != 1))
        if num_runs <= self._few_runs or len(pieces) * piece_bytes >= num_runs * self._long_run_bytes:
            return _Pieces(offsets, piece_bytes, find_runs(pieces))
        ids = torch.from_numpy(pieces).pin_memory().to(self._device, non_blocking=True)
        return _Pieces(offsets, piece_bytes, [], ids)

    def _copy_runs(self, target: int, source: int, pieces: _Pieces) -> None:
        api, size = self._driver.api, pieces.piece_bytes
        stream = api.CUstream(torch.cuda.current_stream(self._device).cuda_stream)
        for first, count in pieces.runs:
            offset = first * size
            self._driver.call(api.cuMemcpyAsync, target + offset, source + offset, count * size, stream)


@dataclass(frozen=True, slots=True)
class _Lane:
    stream: torch.cuda.Stream
    copier: PieceCopier


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way: what it carries, and the events around it; only loads are timed by them."""

    is_load: bool
    carried: LineStats
    begin: torch.cuda.Event
    end: torch.cuda.Event


class CudaLayerLine:
    """A ``LayerLine`` on a GPU; ``open_copier`` makes the copier of each of its two streams."""

    def __init__(self, device: torch.device, num_layers: int, open_copier: Callable[[], PieceCopier]) -> None:
        self._device = device
        self._inbound, self._outbound = (_Lane(_open_stream(device), open_copier()) for _ in range(2))
        self._copies: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * num_layers
        self._written: dict[int, torch.cuda.Event] = {}  # layer -> end of the last write to its copies
        self._left: dict[int, torch.cuda.Event] = {}  # address of a place -> end of the last write from it
        self._under_way: dict[Ticket, _Copy] = {}
        self._num_submitted = 0
        self._stats = LineStats()
        self._lock = threading.Lock()

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        """Set where a layer's copies are, and wait until all copies submitted before have ended."""
        with self._lock:
            self._copies[layer] = (home, near)
        self.drain()

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Load pieces behind the last write from ``place`` and the last write to the layer's copies."""
        with self._lock:
            home, near = self._copies_of(layer)
            waits = [event for event in (self._left.get(place.data_ptr()), self._written.get(layer)) if event]
            pairs, num_bytes = [(place, home if near is None else near)], len(offsets) * piece_bytes
            carried = LineStats(num_bytes, near_loaded_bytes=0 if near is None else num_bytes)
            ticket, _ = self._begin(self._inbound, waits, pairs, offsets, piece_bytes, carried)
            return ticket

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Write pieces of ``place`` to the layer's copies, behind all compute submitted so far."""
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        with self._lock:
            pairs = [(copy, place) for copy in self._copies_of(layer) if copy is not None]
            num_bytes = len(offsets) * piece_bytes
            carried = LineStats(written_bytes=num_bytes, near_written_bytes=(len(pairs) - 1) * num_bytes)
            ticket, end = self._begin(self._outbound, [computed], pairs, offsets, piece_bytes, carried)
            self._written[layer] = self._left[place.data_ptr()] = end
            return ticket

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Copy pieces from home to the near copy, in order with the writes, which it must not overtake."""
        with self._lock:
            home, near = self._copies_of(layer)
            pairs = [] if near is None else [(near, home)]
            carried = LineStats(near_written_bytes=len(pairs) * len(offsets) * piece_bytes)
            ticket, self._written[layer] = self._begin(self._outbound, [], pairs, offsets, piece_bytes, carried)
            return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait for a copy."""
        with self._lock:
            copy = self._under_way.get(ticket)
        if copy is not None:  # else it has ended
            torch.cuda.current_stream(self._device).wait_event(copy.end)

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = _open_timer()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        """Seconds between two marks; None if the later one has not been reached."""
        return begin.elapsed_time(end) / 1e3 if end.query() else None

    def drain(self) -> None:
        """Block until all copies have ended."""
        for lane in (self._inbound, self._outbound):
            lane.stream.synchronize()

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Raise ``InvariantError``: the links of a GPU are real."""
        raise InvariantError("a GPU's links are real: no other ones can be emulated")

    def stats(self) -> LineStats:
        """Totals of the copies that have ended, up to the first that has not."""
        with self._lock:
            self._forget_ended()
            return self._stats

    def close(self) -> None:
        """Wait for all copies, and forget where layers' copies are."""
        self.drain()
        with self._lock:
            self._forget_ended()
            self._copies = [(None, None)] * len(self._copies)

    def _copies_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        home, near = self._copies[layer]
        if home is None:
            raise InvariantError(f"layer {layer} has no copy to stream from")
        return home, near

    def _begin(
        self,
        lane: _Lane,
        waits: Sequence[torch.cuda.Event],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        offsets: np.ndarray,
        piece_bytes: int,
        carried: LineStats,
    ) -> tuple[Ticket, torch.cuda.Event]:
        """Enqueue (target, source) copies behind events; returns their ticket and end, also without pieces."""
        self._forget_ended()
        for event in waits:
            lane.stream.wait_event(event)
        begin, end = _open_timer(), _open_timer()
        with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
            begin.record(lane.stream)
            for target, source in pairs:
                lane.copier.copy(target, source, offsets, piece_bytes)
            end.record(lane.stream)
        self._num_submitted += 1
        ticket = Ticket(self._num_submitted)
        self._under_way[ticket] = _Copy(lane is self._inbound, carried, begin, end)
        return ticket, end

    def _forget_ended(self) -> None:
        while self._under_way:
            ticket, copy = next(iter(self._under_way.items()))
            if not copy.end.query():  # type: ignore[no-untyped-call]
                return
            del self._under_way[ticket]
            load_s = copy.begin.elapsed_time(copy.end) / 1e3 if copy.is_load else 0.0
            self._stats += copy.carried + LineStats(load_s=load_s)


def _open_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose few, small kernels start before the next blocks of a compute kernel that fills the GPU."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _open_timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
