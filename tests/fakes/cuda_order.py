"""Concurrent streams without a GPU, in random order: a stream waits only for its events.

An operation on a stream runs when something waits for it, or never. So an order that no event enforces is violated in
some run. Nothing runs while the host only enqueues operations, and host waits can be forbidden.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch


@dataclass
class Op:
    """A stream's next operation, which runs once ``may_run``."""

    run: Callable[[], None]
    may_run: Callable[[], bool] = lambda: True


class Machine:
    """All streams of a GPU. Use it with ``install``.

    Attributes:
        compute: The stream that is current at first.
        may_block: Whether the host may wait now.
        now_s: Seconds of the device's clock: one for each operation.
        deaf: Streams that wait for no event: for controls.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.streams: list[Stream] = []
        self.may_block = True
        self.now_s = 0
        self.deaf: set[Stream] = set()
        self.compute = self.current = Stream(self)

    def put(self, run: Callable[[], None]) -> None:
        """Enqueue an operation on the current stream."""
        self.current.ops.append(Op(run))

    def go_on_until(self, is_done: Callable[[], bool]) -> None:
        assert self.may_block, "the host waits for the GPU"
        while not is_done():
            ready = [stream for stream in self.streams if stream.ops and stream.ops[0].may_run()]
            assert ready, "all streams wait for each other"
            self.rng.choice(ready).ops.popleft().run()
            self.now_s += 1

    def go_on(self, num_ops: int) -> None:
        """Run up to ``num_ops`` operations while the host does not wait."""
        for _ in range(num_ops):
            ready = [stream for stream in self.streams if stream.ops and stream.ops[0].may_run()]
            if ready:
                self.rng.choice(ready).ops.popleft().run()
                self.now_s += 1

    @contextmanager
    def host_does_not_wait(self) -> Iterator[None]:
        self.may_block = False
        yield
        self.may_block = True

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def install(self, patch: pytest.MonkeyPatch) -> Machine:
        """Install in the place of torch's CUDA."""
        for name, value in {
            "Event": lambda **_: Event(self),
            "Stream": lambda device, priority: Stream(self),
            "current_stream": lambda device: self.current,
            "device": lambda device: nullcontext(),
            "stream": self.on,
        }.items():
            patch.setattr(torch.cuda, name, value)
        return self


class Stream:
    """A stream of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.ops: deque[Op] = deque()
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """Wait for the event's last record; for nothing if it was never recorded."""
        number = event.num_recorded
        if self not in self.machine.deaf:
            self.ops.append(Op(lambda: None, lambda: event.num_passed >= number))

    def synchronize(self) -> None:
        self.machine.go_on_until(lambda: not self.ops)


class Event:
    """An event of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_recorded = self.num_passed = 0
        self.passed_s = 0

    def record(self, stream: Stream) -> None:
        self.num_recorded += 1
        stream.ops.append(Op(self._pass))

    def _pass(self) -> None:
        self.num_passed += 1
        self.passed_s = self.machine.now_s

    def query(self) -> bool:
        return self.num_passed == self.num_recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.num_passed and self.query() and end.num_passed and end.query(), "it has not come to that yet"
        return (end.passed_s - self.passed_s) * 1e3


class PieceByPiece:
    """See ``Copier``: each piece is copied separately, in any order."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def copy(self, target: torch.Tensor, source: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> None:
        to, origin = target.data_ptr(), source.data_ptr()
        for offset in self._machine.rng.sample(offsets.tolist(), len(offsets)):
            self._machine.put(lambda at=offset: ctypes.memmove(to + at, origin + at, piece_bytes) and None)  # type: ignore[misc]
