"""The line of a GPU without one: with streams in any order that events allow, every layer is whole in time."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.memory.cuda.layer_line import CudaLayerLine
from floodplain.memory.host.device import open_private_device
from floodplain.memory.layer_line import Ticket
from floodplain.memory.layer_slots import LayerSlots
from tests.property.test_layer_slots_laws import LAYOUT, PLACES, World, live
from tests.support.examples import examples

# -- concurrent streams without a GPU, in random order -----------------------------------------------------------------


@dataclass
class Op:
    """A stream's next operation, which runs once ``may_run``."""

    run: Callable[[], None]
    may_run: Callable[[], bool] = lambda: True


class Machine:
    """All streams of a GPU, in random order. Use it with ``install``.

    ``compute`` is current at first; ``may_block``: whether the host may wait now. Each operation takes a second of
    ``now_s``. ``deaf`` streams wait for no event: for controls.
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


NUM_LAYERS, NUM_PLACES, NUM_PIECES, PIECE_BYTES = 4, 3, 6, 8
DEVICE = torch.device("cuda", 0)
ALL = np.arange(NUM_PIECES) * PIECE_BYTES
Open = Callable[[Machine], CudaLayerLine]


def open_line(machine: Machine, num_layers: int = NUM_LAYERS) -> CudaLayerLine:
    return CudaLayerLine(DEVICE, num_layers, lambda: PieceByPiece(machine))


def memory() -> torch.Tensor:
    return torch.zeros((NUM_PIECES, PIECE_BYTES // 4), dtype=torch.int32)


class Story:
    """Layers that pass through places in any order, and the expected content of each piece.

    ``visits``: place -> the layer in it, and which of its pieces were loaded; ``last``: place -> the last copy from or
    to it; ``gone``: near copies that were taken away.
    """

    def __init__(self, machine: Machine, line: CudaLayerLine) -> None:
        self.machine, self.line, self.rng = machine, line, machine.rng
        self.places = [memory() for _ in range(NUM_PLACES)]
        self.homes = [memory() for _ in range(NUM_LAYERS)]
        self.nears: list[torch.Tensor | None] = [None] * NUM_LAYERS
        self.gone: list[torch.Tensor] = []
        self.truth = torch.zeros((NUM_LAYERS, NUM_PIECES), dtype=torch.int32)
        self.visits: dict[int, tuple[int, list[int]]] = {}
        self.last: dict[int, Ticket] = {}
        self.next_tag = 1
        for layer, home in enumerate(self.homes):
            line.place(layer, home)

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            self.machine.go_on(self.rng.randrange(8))
            if self.rng.random() < 0.06:
                self.switch(self.rng.randrange(NUM_LAYERS))
            with self.machine.host_does_not_wait():
                self.enter() if self.rng.random() < 0.5 else self.leave()
        self.line.drain()
        self.machine.compute.synchronize()
        for layer, copies in enumerate(zip(self.homes, self.nears, strict=True)):
            for copy in copies:
                expected = self.truth[layer][:, None].expand(NUM_PIECES, 2)
                assert copy is None or torch.equal(copy, expected), "not what was written"
        assert all((copy == -1).all() for copy in self.gone), "not what was left there"

    def enter(self) -> None:
        """An idle layer begins to use a free place."""
        here = {layer for layer, _ in self.visits.values()}
        free, idle = set(range(NUM_PLACES)) - {*self.visits}, set(range(NUM_LAYERS)) - here
        if free and idle:
            place, layer = self.rng.choice(sorted(free)), self.rng.choice(sorted(idle))
            pieces = self.rng.sample(range(NUM_PIECES), self.rng.choice([0, 2, 4, NUM_PIECES]))
            if pieces:
                self.last[place] = self.line.load(layer, self.places[place], self.offsets(pieces), PIECE_BYTES)
            self.visits[place] = (layer, pieces)

    def leave(self) -> None:
        """A layer computes in its place, and its new rows are written to its copies."""
        if not self.visits:
            return
        place = self.rng.choice(sorted(self.visits))
        layer, pieces = self.visits.pop(place)
        if place in self.last:
            self.line.wait(self.last[place])
        before, written = self.truth[layer].clone(), self.rng.sample(range(NUM_PIECES), self.rng.choice([0, 1, 3]))
        for piece in written:
            self.truth[layer, piece], self.next_tag = self.next_tag, self.next_tag + 1
        after = self.truth[layer].clone()
        self.machine.put(lambda: self.compute(self.places[place], pieces, before, written, after))
        self.last[place] = self.line.write(layer, self.places[place], self.offsets(written), PIECE_BYTES)

    @staticmethod
    def compute(
        place: torch.Tensor, pieces: list[int], before: torch.Tensor, written: list[int], after: torch.Tensor
    ) -> None:
        assert place[pieces, 0].tolist() == place[pieces, 1].tolist() == before[pieces].tolist(), "not what was written"
        place[written] = after[written][:, None]

    def switch(self, layer: int) -> None:
        """A layer gets or loses a near copy: no later copy may touch the lost one."""
        gone, self.nears[layer] = self.nears[layer], memory() if self.nears[layer] is None else None
        self.line.place(layer, self.homes[layer], self.nears[layer])
        with self.machine.host_does_not_wait():
            self.line.fill(layer, ALL, PIECE_BYTES)
        if gone is not None:
            self.gone.append(gone.fill_(-1))

    def offsets(self, pieces: list[int]) -> np.ndarray:
        return np.array(pieces, dtype=np.int64) * PIECE_BYTES


@contextmanager
def story(seed: int, open_one: Open = open_line) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(seed).install(patch)
        line = open_one(machine)
        yield Story(machine, line)
        line.close()
        line.close()


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_a_layer_is_whole_in_its_place_and_so_are_its_copies(seed: int) -> None:
    with story(seed) as one:
        one.run(60)


class _Never(dict[Any, Any]):
    """Discards every item."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _line_without(fault: str) -> Open:
    def open_one(machine: Machine) -> CudaLayerLine:
        line: Any = open_line(machine)
        if fault in ("_left", "_written"):
            setattr(line, fault, _Never())
        elif fault == "fill":
            line.fill = partial(_fill_unnoticed, line, line.fill)
        elif fault == "compute":
            machine.deaf.add(machine.compute)
        elif fault == "place":
            line.place = lambda layer, home, near=None: line._copies.__setitem__(layer, (home, near))
        else:
            machine.deaf.add(line._outbound.stream)
        return line  # type: ignore[no-any-return]

    return open_one


def _fill_unnoticed(line: Any, fill: Callable[..., Ticket], layer: int, *args: Any) -> None:
    before = dict(line._written)
    fill(layer, *args)
    line._written = before


@pytest.mark.parametrize("fault", ["_left", "_written", "fill", "compute", "outbound", "place"])
def test_control_each_wait_is_needed(fault: str) -> None:
    with pytest.raises(AssertionError, match="not what was"):
        for seed in range(40):
            with story(seed, _line_without(fault)) as one:
                one.run(60)


class LateWorld(World):
    """A world whose steps run behind the host, as on a GPU; each step ends before its tokens are read."""

    machine: Machine

    def launch(self, work: Callable[[], None]) -> None:
        self.machine.put(work)

    def _compute(self, starts: dict[int, int], counts: dict[int, int], tokens: np.ndarray) -> None:
        with self.machine.host_does_not_wait():
            super()._compute(starts, counts, tokens)
        self.machine.compute.synchronize()
        stall_s = self.slots.stall_s
        step_s = self.slots.take_step_s()
        assert 0 < step_s <= self.machine.now_s and self.slots.stall_s >= stall_s
        assert not self.slots._clock._waits, "a wait is not known though the step has ended"


def _live_on_streams(seed: int, kind: type[LayerSlots] = LayerSlots) -> int:
    """Return the number of bytes loaded."""
    with pytest.MonkeyPatch.context() as patch, open_private_device(2**24) as device:
        machine = Machine(seed).install(patch)
        one = LateWorld(device, open_line(machine, LAYOUT.num_layers), seed, kind)
        one.machine = machine
        one.change(PLACES[-1])
        live(one, 40)
        stats = one.line.stats()
        assert stats.written_bytes > 0 < stats.load_s < machine.now_s
        one.slots.close()
        one.pool.close()
        assert not one.homes
    return stats.loaded_bytes


def test_layers_stream_beside_a_gpu_and_the_host_never_waits_in_a_step() -> None:
    assert sum(_live_on_streams(seed) for seed in range(6)) > 0


class _Hasty(LayerSlots):
    """Control: compute does not wait for loads."""

    def before_layer(self, index: int) -> None:
        pass


def test_control_compute_waits_for_its_loads() -> None:
    with pytest.raises(AssertionError, match=r"sequence \d, token"):
        for seed in range(5):
            _live_on_streams(seed, _Hasty)


def test_stalls_are_known_once_compute_reached_them_loads_once_they_ended() -> None:
    with story(0) as one:
        ticket = one.line.load(0, one.places[0], ALL, PIECE_BYTES)
        begin = one.line.mark()
        one.line.wait(ticket)
        end = one.line.mark()
        assert one.line.elapsed_s(begin, end) is None
        assert one.line.stats().loaded_bytes == 0
        one.machine.compute.synchronize()
        stall_s = one.line.elapsed_s(begin, end)
        assert stall_s is not None and 0 < stall_s < one.machine.now_s
        assert one.line.stats().loaded_bytes == len(ALL) * PIECE_BYTES


def test_what_cannot_be_is_refused() -> None:
    with story(0) as one:
        with pytest.raises(InvariantError, match="a GPU's links are real"):
            one.line.pace(1e9)
        one.line.place(0, None)
        with pytest.raises(InvariantError, match="layer 0 has no copy"):
            one.line.load(0, one.places[0], ALL, PIECE_BYTES)
        assert not one.line._inbound.stream.ops
