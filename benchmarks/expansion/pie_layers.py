"""Pie's own way in the engine: whole layers go out and come in, as ``pie_fifo`` decides. The baseline.

Layers have no copies that stay: one that leaves the device is copied out whole, all blocks with content, and takes a
place in the host's memory; one that returns is copied in whole. One copy a direction is under way at a time. Memory on
the device is that of the engine's own way with as many arenas, so both hold the same blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction
from floodplain.memory.host.layer_line import HostClock
from floodplain.memory.layer_line import LayerLine, LineStats, StepClock, Ticket
from floodplain.memory.layer_slots import LayerSlots


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy under way.

    Attributes:
        number: Of all copies.
        line: What carries it.
        ticket: Of that line; None if there was nothing to copy.
        loaded_bytes: What that line has carried when this copy is done.
        ready_s: When the emulated link has carried it.
    """

    number: Ticket
    line: LayerLine
    ticket: Ticket | None
    loaded_bytes: int
    ready_s: float

    @property
    def has_ended(self) -> bool:
        """Whether its bytes are there, and would be behind the emulated link."""
        return self.line.stats().loaded_bytes >= self.loaded_bytes and time.monotonic() >= self.ready_s

    def wait(self) -> None:
        """Stand still until it has ended."""
        if self.ticket is not None:
            self.line.wait(self.ticket)
        time.sleep(max(0.0, self.ready_s - time.monotonic()))


class TwoWayLine(HostClock):
    """A line for each direction, with one copy at a time, over links that are emulated alike.

    Each line *loads*: inbound from places on the host, outbound from places on the device. Pacing is done here, since
    whether a copy has ended must be known without a wait for it.

    Args:
        inbound: Carries layers onto the device; nothing is under way on it.
        outbound: Carries them off it.
        is_shared: Both directions go over one link, copy by copy. Else each has one of the full bandwidth.
    """

    def __init__(self, inbound: LayerLine, outbound: LayerLine, *, is_shared: bool) -> None:
        self.under_way: dict[Direction, Copy] = {}
        self._lines = {Direction.INBOUND: inbound, Direction.OUTBOUND: outbound}
        self._sent_bytes = {direction: line.stats().loaded_bytes for direction, line in self._lines.items()}
        self._is_shared = is_shared
        self._num_started = 0
        self._bytes_s = 0.0
        self._free_s = 0.0  # when the shared link has carried all

    def set_places(self, direction: Direction, places: Sequence[torch.Tensor]) -> None:
        """Say where copies of a direction come from, by number."""
        for number, place in enumerate(places):
            self._lines[direction].place(number, place)

    def start(self, direction: Direction, source: int, to: torch.Tensor, offsets: np.ndarray, piece_bytes: int) -> None:
        """Copy pieces of a place to ``to``; the last copy of this direction has ended."""
        num_bytes = len(offsets) * piece_bytes
        self._sent_bytes[direction] += num_bytes
        begin_s = time.monotonic()
        if self._is_shared:
            begin_s = max(self._free_s, begin_s)
        self._free_s = ready_s = begin_s + (num_bytes / self._bytes_s if self._bytes_s else 0.0)
        line = self._lines[direction]
        ticket = line.load(source, to, offsets, piece_bytes) if num_bytes else None
        self._num_started += 1
        number = Ticket(self._num_started)
        self.under_way[direction] = Copy(number, line, ticket, self._sent_bytes[direction], ready_s)

    def take_ended(self) -> list[Direction]:
        """Directions whose copy has ended, each once."""
        ended = [direction for direction, copy in self.under_way.items() if copy.has_ended]
        for direction in ended:
            del self.under_way[direction]
        return ended

    @property
    def due_first(self) -> Ticket:
        """The copy under way that will end first."""
        return min(self.under_way.values(), key=lambda copy: copy.ready_s).number

    def wait(self, ticket: Ticket) -> None:
        """Wait for one copy."""
        next(copy for copy in self.under_way.values() if copy.number == ticket).wait()

    def pace(self, bytes_s: float, near_bytes_s: float = 0.0) -> None:
        """Set the rate of copies both ways; no memory is nearer."""
        self._bytes_s = bytes_s

    def drain(self) -> None:
        """Wait for the copies both ways."""
        for line in self._lines.values():
            line.drain()

    def stats(self) -> LineStats:
        """Bytes both ways; time on the link is what the copies themselves took."""
        loaded = self._lines[Direction.INBOUND].stats()
        return LineStats(loaded.loaded_bytes, loaded.load_s, self._lines[Direction.OUTBOUND].stats().loaded_bytes)

    def close(self) -> None:
        """Close the lines both ways."""
        for line in self._lines.values():
            line.close()


class PieLayers(LayerSlots):
    """Layers that move by Pie's rule, from ``move_whole_layers``. The number of arenas never changes."""

    line: Any  # a TwoWayLine
    _fifo: PieFifo
    _ledger: BlockLedger

    def _find_present(self, layer: int) -> torch.Tensor:
        place = self._fifo.table[layer].gpu_place
        if place is None:
            raise InvariantError(f"layer {layer} has no place on the device")
        return self._pool.layers[self.places.arenas[place]]

    def begin_step(self, read_blocks: np.ndarray, written_tokens: np.ndarray) -> None:
        """Copies that begin in this step carry all blocks that have content in it."""
        self._clock.begin_step()
        self._reads = self._offsets_of_content(self._ledger)
        self.step_bytes = len(self._reads) * self._block_bytes

    def before_layer(self, index: int) -> None:
        """Begin copies, and return when the layer is on the device."""
        self._begin_swaps(index)
        while not self._fifo.is_present(index):
            self._clock.wait(self.line.due_first)
            self._begin_swaps(index)

    def after_layer(self, index: int) -> None:
        """The new rows of a layer go out with all of it."""
        if index == len(self) - 1:
            self._clock.end_step()

    @property
    def home_bytes(self) -> int:
        """Memory that places on the host take, as far as the pool has blocks."""
        return len(self._far) * self._pool.num_blocks * self._block_bytes

    def _begin_swaps(self, layer: int) -> None:
        now = time.monotonic()
        for direction in self.line.take_ended():
            self._fifo.swap_ended(direction, now)
        for swap in self._fifo.begin_layer(layer, now):
            near, far = self._pool.layers[self.places.arenas[swap.gpu_place]], self._far[swap.cpu_place]
            is_inbound = swap.direction is Direction.INBOUND
            source, to = (swap.cpu_place, near) if is_inbound else (swap.gpu_place, far)
            self.line.start(swap.direction, source, to, self._reads, self._block_bytes)

    def _take_over(self, ledger: BlockLedger, line: TwoWayLine) -> None:
        self.line.close()
        self.line, self._clock, self._ledger = line, StepClock(line), ledger
        self._tensor_of = self._find_present
        self._fifo = PieFifo(len(self), self.places.num_arenas)
        self._far = list(self._homes.values())[: self._fifo.num_cpu_places]
        line.set_places(Direction.INBOUND, self._far)
        line.set_places(Direction.OUTBOUND, [self._pool.layers[layer] for layer in self.places.arenas])


def move_whole_layers(slots: LayerSlots, ledger: BlockLedger, line: TwoWayLine) -> None:
    """Let layers move by Pie's rule from now on.

    Args:
        slots: Some layers stream, their number never changes, and nothing was computed; a ``PieLayers`` afterwards.
        ledger: Of the pool, in which blocks neither move nor go.
        line: Closed by the slots.
    """
    pie: Any = slots
    pie.__class__ = PieLayers
    pie._take_over(ledger, line)
