"""Steps of layers in virtual time, copy by copy: an oracle of closed forms, and Pie's rule beside loads ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from benchmarks.expansion.pie_fifo import PieFifo
from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction


@dataclass(frozen=True, slots=True)
class LayerLink:
    """The path between the device and the memory that layers stream from, with bytes per second each way.

    With ``shares_duplex``, copies of both directions at the same time run at half their speed each.
    """

    inbound_bandwidth: float
    outbound_bandwidth: float
    shares_duplex: bool = False

    def copy_s(self, direction: Direction, num_bytes: int) -> float:
        """Seconds of one copy that has the link to itself."""
        return num_bytes / (self.inbound_bandwidth if direction is Direction.INBOUND else self.outbound_bandwidth)


@dataclass(slots=True, eq=False)
class LayerCopy:
    """One copy of a layer, or of rows of it, which begins when the copy ``after`` has ended."""

    direction: Direction
    num_bytes: int
    after: LayerCopy | None = None
    has_ended: bool = False
    left_s: float = 0.0


class LayerSchedule:
    """Back-to-back steps, and copies beside them. Copies of one direction start in the order of ``copy``."""

    def __init__(self, link: LayerLink) -> None:
        self.now = 0.0
        self.num_bytes = dict.fromkeys(Direction, 0)
        self._link = link
        self._lines: dict[Direction, deque[LayerCopy]] = {direction: deque() for direction in Direction}

    def step(self, work: LayerWork) -> float:
        """Compute all layers once. Returns the seconds in which a layer waited for its KV."""
        stall_s = 0.0
        self.begin_step(work)
        for layer, compute_s in enumerate(work.compute_s):
            asked_at_s = self.now
            self.await_layer(layer, work)
            stall_s += self.now - asked_at_s
            self.advance(self.now + compute_s)
            self.end_layer(layer, work)
        return stall_s

    def copy(self, direction: Direction, num_bytes: int, after: LayerCopy | None = None) -> LayerCopy:
        """Append a copy to the queue of its direction."""
        copy = LayerCopy(direction, num_bytes, after, left_s=self._link.copy_s(direction, num_bytes))
        self.num_bytes[direction] += num_bytes
        self._lines[direction].append(copy)
        return copy

    def advance(self, until_s: float) -> None:
        """Advance the clock and the copies to ``until_s``."""
        while self._run(until_s):
            pass
        self.now = until_s

    def wait_for_any(self) -> None:
        """Advance the clock until the next copy has ended."""
        assert self._run(float("inf")), "a layer waits, and no copy is under way"

    def begin_step(self, work: LayerWork) -> None:
        """Called before the first layer."""

    def await_layer(self, layer: int, work: LayerWork) -> None:
        """Advance the clock until all KV of a layer is on the device."""
        raise NotImplementedError

    def end_layer(self, layer: int, work: LayerWork) -> None:
        """Called after a layer has computed."""

    def copied(self, copy: LayerCopy) -> None:
        """Called with each copy that ends, in order of time."""

    def _run(self, until_s: float) -> bool:
        """Advance the clock until a copy ends, at most to ``until_s``. True if one ended."""
        heads = [line[0] for line in self._lines.values() if line]
        heads = [copy for copy in heads if copy.after is None or copy.after.has_ended]
        if not heads:
            return False
        slowdown = len(heads) if self._link.shares_duplex else 1
        first = min(heads, key=lambda copy: copy.left_s)
        end_s = self.now + slowdown * first.left_s
        has_ended = end_s <= until_s + 1e-9  # sums of times are not exact
        passed_s = first.left_s if has_ended else (until_s - self.now) / slowdown
        for copy in heads:
            copy.left_s = max(0.0, copy.left_s - passed_s)
        self.now = min(end_s, until_s)
        if has_ended:
            self._lines[first.direction].popleft()
            first.has_ended, first.after = True, None
            self.copied(first)
        return has_ended


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one step in each layer. Blocks, and so bytes, are the same in all layers.

    Attributes:
        compute_s: Seconds of each layer.
        read_bytes: KV of one layer that the step reads. ``PieLayers`` copies as much both ways.
        written_bytes: KV of one layer that the step adds.
    """

    compute_s: tuple[float, ...]
    read_bytes: int
    written_bytes: int = 0


class AheadLayers(LayerSchedule):
    """Loads streamed layers before they compute: at the start of the step, and after each use of a slot."""

    def __init__(self, places: LayerPlaces, link: LayerLink) -> None:
        super().__init__(link)
        self.places = places
        self._loads: dict[int, LayerCopy] = {}  # of this step, by layer
        self._written: dict[int, LayerCopy] = {}  # the last write-through from each slot

    def begin_step(self, work: LayerWork) -> None:
        for layer in self.places.first:
            self._load(layer, work)

    def await_layer(self, layer: int, work: LayerWork) -> None:
        while self.places.slot_of(layer) is not None and not self._loads[layer].has_ended:
            self.wait_for_any()

    def end_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is None:
            return
        self._written[self.places.arena_of(layer)] = self.copy(Direction.OUTBOUND, work.written_bytes)
        follower = self.places.follower(layer)
        if follower is not None:
            self._load(follower, work)

    def _load(self, layer: int, work: LayerWork) -> None:
        written = self._written.get(self.places.arena_of(layer))
        self._loads[layer] = self.copy(Direction.INBOUND, work.read_bytes, written)


class PieLayers(LayerSchedule):
    """Whole layers are swapped out and in, one at a time in each direction, as ``pie_fifo`` decides."""

    def __init__(self, fifo: PieFifo, link: LayerLink) -> None:
        super().__init__(link)
        self.fifo = fifo

    def await_layer(self, layer: int, work: LayerWork) -> None:
        self._begin_swaps(layer, work)
        while not self.fifo.is_present(layer):
            self.wait_for_any()
            self._begin_swaps(layer, work)

    def copied(self, copy: LayerCopy) -> None:
        self.fifo.swap_ended(copy.direction, self.now)

    def _begin_swaps(self, layer: int, work: LayerWork) -> None:
        for swap in self.fifo.begin_layer(layer, self.now):
            self.copy(swap.direction, work.read_bytes)
