"""Steps in virtual time, layer by layer, with copies of the KV of some layers.

Three schedules differ in when layers are copied. ``AheadLayers`` is ours (``core.layer_places``): new rows are written
through, and a layer is loaded as soon as a slot is free. ``OnDemandLayers`` loads a layer when it must compute
(FlexGen's way). ``PieLayers`` swaps whole layers out and in (``policy.pie_fifo``).
"""

from __future__ import annotations

from floodplain.core.layer_places import LayerPlaces
from floodplain.core.tiers import Direction
from floodplain.policy.pie_fifo import PieFifo
from floodplain.sim.layer_copies import LayerCopy, LayerLink
from floodplain.sim.layer_schedule import LayerSchedule, LayerWork


class AheadLayers(LayerSchedule):
    """Loads streamed layers before they compute: at the start of the step, and after each use of a slot.

    Args:
        places: Which layers stream.
        link: As in ``LayerSchedule``.
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
        """The copies that a load into a slot must follow: the last write-through from it.

        Writes are in order, and the layer's own last write is earlier, since more layers stream than there are slots.
        """
        return (self._written[slot],) if slot in self._written else ()

    def _place_of(self, layer: int) -> int:
        return self.places.arena_of(layer)


class OnDemandLayers(AheadLayers):
    """As ``AheadLayers``, but a streamed layer is loaded only when it must compute (FlexGen's way)."""

    def _begin_step(self, work: LayerWork) -> None:
        """No layer is loaded ahead."""

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
        fifo: The rule; not shared with another schedule.
        link: As in ``LayerSchedule``.
    """

    def __init__(self, fifo: PieFifo, link: LayerLink) -> None:
        super().__init__(link)
        self.fifo = fifo

    def _begin_step(self, work: LayerWork) -> None:
        """Nothing: swaps start only with layers."""

    def _end_layer(self, layer: int, work: LayerWork) -> None:
        """Nothing: new rows are swapped out with the whole layer."""

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
