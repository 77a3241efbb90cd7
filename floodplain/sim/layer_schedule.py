"""The common part of schedules of layers: wait for a layer's KV, compute it, count times and bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from floodplain.core.tiers import Direction
from floodplain.sim.layer_copies import LayerCopies, LayerCopy, LayerLink


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one step in each layer. Blocks, and so bytes, are the same in all layers.

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
    """The times and bytes of one step.

    Attributes:
        duration_s: From its start to the end of its last layer.
        stall_s: Part of it in which a layer waited for its KV.
        inbound_bytes: Bytes of the copies that it enqueued towards the device, and
        outbound_bytes: away from it. The last ones may end in a later step.
    """

    duration_s: float
    stall_s: float
    inbound_bytes: int
    outbound_bytes: int


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A computation or a copy of one layer, from start to end.

    Attributes:
        layer: The layer.
        direction: Direction of a copy; None for computing.
        device_place: The arena or place on the device.
        host_place: The one at the other end of a copy; None for computing.
        begun_at_s: Start, in seconds of virtual time.
        ended_at_s: End, likewise.
        num_bytes: Bytes of a copy.
    """

    layer: int
    direction: Direction | None
    device_place: int
    host_place: int | None
    begun_at_s: float
    ended_at_s: float
    num_bytes: int = 0


class LayerSchedule(ABC):
    """Back-to-back steps, and copies beside them.

    Args:
        link: The link of the copies.

    Attributes:
        copies: Copies under way, and the clock.
        on_span: Called with each span that has ended, for timelines and checks.
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
        """Called before the first layer."""

    @abstractmethod
    def _await_layer(self, layer: int, work: LayerWork) -> None:
        """Advance the clock until all KV of a layer is on the device."""

    @abstractmethod
    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """Called after a layer has computed."""

    @abstractmethod
    def _place_of(self, layer: int) -> int:
        """The device place in which a layer computes."""

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
