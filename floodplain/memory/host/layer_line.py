"""Lines of streamed layers within a host's memory: a native thread, or Python's where nothing can be compiled."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from floodplain.memory.layer_line import LayerLine, LineStats, Mark, Ticket
from floodplain.memory.native.build import load_library
from floodplain.memory.runs import find_runs

SOURCE = Path(__file__).parents[1] / "native" / "layer_line.cpp"
_LOAD, _WRITE, _FILL = range(3)


class HostClock:
    """``LayerLine.mark`` and ``elapsed_s`` where compute is the calling thread."""

    def mark(self) -> Mark:
        """The time now, in seconds."""
        return time.perf_counter()

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        """Seconds from one mark to a later one, known at once."""
        return float(end - begin)


class NativeLayerLine(HostClock):
    """A ``LayerLine`` by a C++ thread, which takes no lock of Python's, and no thread of torch's pool."""

    def __init__(self, library: ctypes.CDLL, num_layers: int) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        library.layer_line_open.argtypes, library.layer_line_open.restype = [count], pointer
        library.layer_line_submit.argtypes = [pointer, ctypes.c_int, count, pointer, pointer, count, count]
        library.layer_line_submit.restype = count
        library.layer_line_wait.argtypes = [pointer, count]
        library.layer_line_place.argtypes = [pointer, count, pointer, pointer]
        library.layer_line_pace.argtypes = [pointer, ctypes.c_double, ctypes.c_double]
        library.layer_line_stats.argtypes = [pointer, pointer]
        library.layer_line_close.argtypes = [pointer]
        self._library = library
        self._line: int | None = library.layer_line_open(num_layers)
        self._last = Ticket(0)

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        """Set where a layer's copies are; when this returns, nothing is copied from or to the earlier ones."""
        self._library.layer_line_place(self._line, layer, _address(home), _address(near))

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a load of pieces into ``place``, from the near copy if there is one, else from home."""
        return self._submit(_LOAD, layer, place, offsets, piece_bytes)

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a write of pieces of ``place`` to all copies of the layer."""
        return self._submit(_WRITE, layer, place, offsets, piece_bytes)

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a copy of pieces from home to the near copy, if there is one."""
        return self._submit(_FILL, layer, None, offsets, piece_bytes)

    def wait(self, ticket: Ticket) -> None:
        """Block the caller until this copy, and all before it, have ended."""
        self._library.layer_line_wait(self._line, ticket)

    def drain(self) -> None:
        """Block until all copies submitted so far have ended."""
        self.wait(self._last)

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Emulate links of these bandwidths; 0: as fast as this machine copies."""
        self._library.layer_line_pace(self._line, home_bytes_s, near_bytes_s)

    def stats(self) -> LineStats:
        """Totals of the copies that have ended."""
        counts = np.zeros(5, dtype=np.int64)
        self._library.layer_line_stats(self._line, counts.ctypes.data)
        loaded, load_ns, written, near_loaded, near_written = counts.tolist()
        return LineStats(loaded, load_ns / 1e9, written, near_loaded, near_written)

    def close(self) -> None:
        """Wait for the copies under way, and stop the thread. A second call does nothing."""
        line, self._line = self._line, None
        if line is not None:
            self._library.layer_line_close(line)

    def _submit(
        self, kind: int, layer: int, place: torch.Tensor | None, offsets: np.ndarray, piece_bytes: int
    ) -> Ticket:
        offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        self._last = Ticket(
            self._library.layer_line_submit(
                self._line, kind, layer, _address(place), offsets.ctypes.data, len(offsets), piece_bytes
            )
        )
        return self._last


class PythonLayerLine(HostClock):
    """A ``LayerLine`` where nothing can be compiled; slower, since its thread waits for Python's lock."""

    def __init__(self, num_layers: int) -> None:
        self._copies: list[tuple[np.ndarray | None, np.ndarray | None]] = [(None, None)] * num_layers
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._copies_lock, self._changed = threading.Lock(), threading.Condition()
        self._num_submitted = self._num_done = 0
        self._pace = (0.0, 0.0)
        self._free_s = 0.0
        self._ready_s: dict[int, float] = {}
        self._stats = LineStats()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="layer-line", daemon=True)
        self._thread.start()

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        """Set where a layer's copies are; when this returns, nothing is copied from or to the earlier ones."""
        with self._copies_lock:
            self._copies[layer] = (_as_bytes(home), _as_bytes(near))

    def load(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a load of pieces into ``place``, from the near copy if there is one, else from home."""
        submitted_s, number = time.monotonic(), self._num_submitted + 1
        return self._submit(lambda: self._load(number, submitted_s, layer, place, offsets, piece_bytes))

    def write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a write of pieces of ``place`` to all copies of the layer."""
        return self._submit(lambda: self._write(layer, place, offsets, piece_bytes))

    def fill(self, layer: int, offsets: np.ndarray, piece_bytes: int) -> Ticket:
        """Queue a copy of pieces from home to the near copy, if there is one."""
        submitted_s = time.monotonic()
        return self._submit(lambda: self._fill(submitted_s, layer, offsets, piece_bytes))

    def wait(self, ticket: Ticket) -> None:
        """Block the caller until this copy, and all before it, have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= ticket)
            ready_s = self._ready_s.pop(ticket, 0.0)
        time.sleep(max(0.0, ready_s - time.monotonic()))

    def drain(self) -> None:
        """Block until all copies submitted so far have ended."""
        self.wait(Ticket(self._num_submitted))
        self._ready_s.clear()

    def pace(self, home_bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Emulate links of these bandwidths; 0: as fast as this machine copies."""
        with self._copies_lock:
            self._pace = (home_bytes_s, near_bytes_s)

    def stats(self) -> LineStats:
        """Totals of the copies that have ended."""
        return self._stats

    def close(self) -> None:
        """Wait for the copies under way, and stop the thread. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _submit(self, job: Callable[[], None]) -> Ticket:
        self._num_submitted += 1
        self._jobs.put(job)
        return Ticket(self._num_submitted)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._copies_lock:
                job()
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()

    def _load(
        self, number: int, submitted_s: float, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int
    ) -> None:
        begin_s, (home, near) = time.monotonic(), self._copies[layer]
        num_bytes = len(offsets) * piece_bytes
        _copy_pieces(_as_bytes(place), home if near is None else near, offsets, piece_bytes)
        duration_s, bytes_s = time.monotonic() - begin_s, self._pace[near is not None]
        if bytes_s:
            self._ready_s[number] = self._take_link(submitted_s, num_bytes / bytes_s)
            duration_s = max(duration_s, num_bytes / bytes_s)
        self._stats += LineStats(num_bytes, duration_s, near_loaded_bytes=0 if near is None else num_bytes)

    def _write(self, layer: int, place: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> None:
        num_bytes = len(offsets) * piece_bytes
        copies = [copy for copy in self._copies[layer] if copy is not None]
        for copy in copies:
            _copy_pieces(copy, _as_bytes(place), offsets, piece_bytes)
        self._stats += LineStats(written_bytes=num_bytes, near_written_bytes=num_bytes * (len(copies) - 1))

    def _fill(self, submitted_s: float, layer: int, offsets: np.ndarray, piece_bytes: int) -> None:
        (home, near), num_bytes = self._copies[layer], len(offsets) * piece_bytes
        if near is None:
            return
        _copy_pieces(near, home, offsets, piece_bytes)
        if self._pace[0]:
            self._take_link(submitted_s, num_bytes / self._pace[0])
        self._stats += LineStats(near_written_bytes=num_bytes)

    def _take_link(self, submitted_s: float, link_s: float) -> float:
        """Book ``link_s`` seconds on the modelled link; returns when they end, on the monotonic clock."""
        self._free_s = max(self._free_s, submitted_s) + link_s
        return self._free_s


def open_layer_line(num_layers: int) -> LayerLine:
    """The fastest line that this machine can run, started: native, or Python's if nothing can be compiled."""
    library = load_library(SOURCE, "a thread of Python's")
    return PythonLayerLine(num_layers) if library is None else NativeLayerLine(library, num_layers)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _as_bytes(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.view(-1).view(torch.uint8).numpy()


def _copy_pieces(to: np.ndarray | None, source: np.ndarray | None, offsets: np.ndarray, piece_bytes: int) -> None:
    assert to is not None and source is not None
    order = np.sort(offsets)
    for first, count in find_runs((order // piece_bytes).tolist()):
        piece = slice(first * piece_bytes, (first + count) * piece_bytes)
        to[piece] = source[piece]
