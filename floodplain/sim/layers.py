"""A step in virtual time, layer by layer, while the KV of some layers is copied: how long it takes, and why.

Three schedules differ in when layers are copied. ``AheadLayers`` is ours (``core.layer_places``): new rows are written
through, and a layer is loaded as soon as a slot is free. ``OnDemandLayers`` loads a layer when it is to compute
(FlexGen's way). ``PieLayers`` swaps whole layers out and in (``policy.pie_fifo``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction
from floodplain.policy.pie_fifo import PieFifo
from floodplain.sim.layer_copies import LayerCopies, LayerCopy, LayerLink


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one step does in each layer. Blocks are the same in all layers, so bytes are too.

    Attributes:
        compute_s: Seconds of each layer.
        read_bytes: KV of one layer that the step reads.
        written_bytes: KV of one layer that the step adds.
        held_bytes: KV of one layer that live requests hold, read in this step or not. Only ``PieLayers`` copies it all.
    """

    compute_s: tuple[float, ...]
    read_bytes: int
    written_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step took.

    Attributes:
        duration_s: From its begin to the end of its last layer.
        stall_s: Part of it in which a layer waited for its KV.
        inbound_bytes: Of the copies towards the device that it asked for, and
        outbound_bytes: of those away from it. The last ones end in a later step.
    """

    duration_s: float
    stall_s: float
    inbound_bytes: int
    outbound_bytes: int


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """One layer that computes or is copied, from begin to end.

    Attributes:
        layer: Which one.
        direction: Of the copy; None for computing.
        device_place: The arena or place on the device.
        host_place: The one at the other end of a copy; None for computing.
        begun_at_s: Seconds of virtual time, as
        ended_at_s: well.
        num_bytes: Of the copy.
    """

    layer: int
    direction: Direction | None
    device_place: int
    host_place: int | None
    begun_at_s: float
    ended_at_s: float
    num_bytes: int = 0


class LayerSchedule(ABC):
    """Steps that follow each other without a pause, and copies beside them.

    Args:
        link: Where layers are copied to and from.

    Attributes:
        copies: Copies under way, and the clock.
        on_span: Called with whatever has ended, for timelines and checks.
    """

    def __init__(self, link: LayerLink) -> None:
        self.copies = LayerCopies(link, self._on_copied)
        self.on_span: Callable[[LayerSpan], None] | None = None
        self._asked_bytes = dict.fromkeys(Direction, 0)

    def step(self, work: LayerWork) -> StepCost:
        """Compute all layers once."""
        begun_at_s, stall_s = self.copies.now, 0.0
        self._asked_bytes = dict.fromkeys(Direction, 0)
        self._begin_step(work)
        for layer, compute_s in enumerate(work.compute_s):
            asked_at_s = self.copies.now
            self._await_layer(layer, work)
            stall_s += self.copies.now - asked_at_s
            self._compute(layer, compute_s)
            self._end_layer(layer, work)
        asked = self._asked_bytes
        duration_s = self.copies.now - begun_at_s
        return StepCost(duration_s, stall_s, asked[Direction.INBOUND], asked[Direction.OUTBOUND])

    @abstractmethod
    def _begin_step(self, work: LayerWork) -> None:
        """Before the first layer."""

    @abstractmethod
    def _await_layer(self, layer: int, work: LayerWork) -> None:
        """Let time pass until all KV of a layer is on the device."""

    @abstractmethod
    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """A layer has computed."""

    @abstractmethod
    def _place_of(self, layer: int) -> int:
        """Where a layer computes."""

    def _compute(self, layer: int, compute_s: float) -> None:
        begun_at_s = self.copies.now
        self.copies.advance(begun_at_s + compute_s)
        if self.on_span is not None:
            self.on_span(LayerSpan(layer, None, self._place_of(layer), None, begun_at_s, self.copies.now))

    def _copy(self, copy: LayerCopy) -> LayerCopy:
        self._asked_bytes[copy.direction] += copy.num_bytes
        self.copies.enqueue(copy)
        return copy

    def _on_copied(self, copy: LayerCopy) -> None:
        if self.on_span is None:
            return
        assert copy.begun_at_s is not None and copy.ended_at_s is not None
        places = (copy.device_place, copy.host_place)
        self.on_span(
            LayerSpan(copy.layer, copy.direction, *places, copy.begun_at_s, copy.ended_at_s, copy.num_bytes),
        )


class AheadLayers(LayerSchedule):
    """Streamed layers are loaded before they compute: at the step's begin, and behind each use of a slot.

    Args:
        places: Which layers stream.
        link: See ``LayerSchedule``.
    """

    def __init__(self, places: LayerPlaces, link: LayerLink) -> None:
        super().__init__(link)
        self.places = places
        self._loads: dict[int, LayerCopy] = {}  # of this step, by layer
        self._written: dict[int, LayerCopy] = {}  # the last write-through from each slot

    def _begin_step(self, work: LayerWork) -> None:
        for layer in self.places.first:
            self._load(layer, work)

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self.copies.wait_for(self._loads[layer])

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is None:
            return
        self._write_through(layer, work)
        follower = self.places.follower(layer)
        if follower is not None:
            self._load(follower, work)

    def _write_through(self, layer: int, work: LayerWork) -> None:
        slot = self._place_of(layer)
        written = LayerCopy(layer, Direction.OUTBOUND, slot, layer, work.written_bytes)
        self._written[slot] = self._copy(written)

    def _load(self, layer: int, work: LayerWork) -> None:
        slot = self._place_of(layer)
        load = LayerCopy(layer, Direction.INBOUND, slot, layer, work.read_bytes, self._writes_before(slot))
        self._loads[layer] = self._copy(load)

    def _writes_before(self, slot: int) -> tuple[LayerCopy, ...]:
        """What a load into a slot must follow: the last write-through from it.

        Writes are in order, and the layer's own last one is before that: more layers stream than there are slots.
        """
        return (self._written[slot],) if slot in self._written else ()

    def _place_of(self, layer: int) -> int:
        return self.places.arena_of(layer)


class OnDemandLayers(AheadLayers):
    """The same places and write-through, but a streamed layer is loaded only when it is to compute (FlexGen's way)."""

    def _begin_step(self, work: LayerWork) -> None:
        """Nothing is loaded ahead."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self._load(layer, work)
            self.copies.wait_for(self._loads[layer])

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        if self.places.slot_of(layer) is not None:
            self._write_through(layer, work)


class PieLayers(LayerSchedule):
    """Whole layers are swapped out and in, one at a time in each direction, as ``policy.pie_fifo`` decides.

    Args:
        fifo: The rule; it serves no other schedule.
        link: See ``LayerSchedule``.
    """

    def __init__(self, fifo: PieFifo, link: LayerLink) -> None:
        super().__init__(link)
        self.fifo = fifo

    def _begin_step(self, work: LayerWork) -> None:
        """Swaps begin with layers only."""

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """Its new rows go out with all of it."""

    def _await_layer(self, layer: int, work: LayerWork) -> None:
        self._begin_swaps(layer, work)
        while not self.fifo.is_present(layer):
            self.copies.wait_for_any()
            self._begin_swaps(layer, work)

    def _begin_swaps(self, layer: int, work: LayerWork) -> None:
        for swap in self.fifo.begin_layer(layer, self.copies.now):
            self._copy(LayerCopy(swap.layer, swap.direction, swap.gpu_place, swap.cpu_place, work.held_bytes))

    def _on_copied(self, copy: LayerCopy) -> None:
        self.fifo.swap_ended(copy.direction, self.copies.now)
        super()._on_copied(copy)

    def _place_of(self, layer: int) -> int:
        place = self.fifo.table[layer].gpu_place
        assert place is not None
        return place
