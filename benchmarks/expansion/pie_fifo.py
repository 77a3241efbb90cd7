"""Pie's rule for whole layers that are swapped in and out while others compute: the baseline for layers in flight.

Source: Xu et al., "Pie: Pooling CPU Memory for LLM Inference" (arXiv 2411.09317). Of n layers, g have a place on the
GPU at a time; the paper's *expansion* is n / g, its m is n - g (section 3.1; Figure 4: 9 / 7 = 1.28). A layer that is
on its way holds a place on both sides, so of the g places as many as two are buffers, and the CPU has m + 2 places
(section 3.3). Layers are numbered from 0 here, and from 1 in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.errors import InvariantError
from floodplain.core.tiers import Direction

NUM_BUFFERS = 2
"""CPU places beyond one for each layer that has none on the GPU: one sends, one receives (section 3.3, Figure 4)."""


@dataclass(frozen=True, slots=True)
class Swap:
    """One copy of a whole layer, which begins now.

    Attributes:
        layer: Whose KV.
        direction: OUTBOUND is the paper's swap-out, INBOUND its swap-in.
        gpu_place: The place on the GPU that is read (outbound) or written (inbound).
        cpu_place: The place on the CPU at the other end.
    """

    layer: int
    direction: Direction
    gpu_place: int
    cpu_place: int


@dataclass(slots=True)
class TableRow:
    """One layer in the mapping table (section 3.2, Figure 3).

    Attributes:
        gpu_place: The GPU pointer; None if the layer has no place there.
        cpu_place: The CPU pointer; None if the layer has no place there.
        moving: The direction of the swap under way. Until that swap is confirmed, the layer is where it was.
        changed_at_s: When a swap of the layer last began or was confirmed.
    """

    gpu_place: int | None = None
    cpu_place: int | None = None
    moving: Direction | None = None
    changed_at_s: float = 0.0

    @property
    def is_present(self) -> bool:
        """Whether all of the layer is on the GPU, and no swap of it is under way: it may compute."""
        return self.gpu_place is not None and self.moving is None

    @property
    def is_on_cpu(self) -> bool:
        """Whether all of the layer is on the CPU, and no swap of it is under way."""
        return self.gpu_place is None


class PieFifo:
    """The mapping table and the FIFO protocol (sections 3.2 and 3.3). Copies nothing and reads no clock.

    Usage: before a layer computes, call ``begin_layer`` and begin the swaps that it returns. While ``is_present`` is
    False for the layer, wait for a swap, call ``swap_ended``, and call ``begin_layer`` for the same layer again.

    Args:
        num_layers: n. Layers compute in ascending order, then from 0 on again.
        num_gpu_places: g. At first the layers below g have the places of the same numbers.

    Attributes:
        table: The mapping table, one row a layer. Read only.

    Raises:
        InvariantError: There is no place on the GPU, or there are more than layers.
    """

    def __init__(self, num_layers: int, num_gpu_places: int) -> None:
        if not 1 <= num_gpu_places <= num_layers:
            raise InvariantError(f"{num_layers} layers have {num_gpu_places} places on the GPU")
        self.num_layers = num_layers
        self.num_gpu_places = num_gpu_places
        self.num_cpu_places = num_layers - num_gpu_places + NUM_BUFFERS if num_gpu_places < num_layers else 0
        self.table = [TableRow(gpu_place=place) for place in range(num_gpu_places)]
        self.table += [TableRow(cpu_place=place) for place in range(num_layers - num_gpu_places)]
        self._free_gpu: list[int] = []
        self._free_cpu = list(range(num_layers - num_gpu_places, self.num_cpu_places))
        self._under_way: dict[Direction, int] = {}  # the layer that is swapped
        self._layer = -1  # the last one that began

    @property
    def expansion(self) -> float:
        """The paper's expansion, n / (n - m) (section 3.1)."""
        return self.num_layers / self.num_gpu_places

    def is_present(self, layer: int) -> bool:
        """Whether a layer may compute (section 3.2: its GPU pointer exists, and no swap of it is unfinished)."""
        return self.table[layer].is_present

    def begin_layer(self, layer: int, now: float) -> tuple[Swap, ...]:
        """Decide which swaps begin, as ``layer`` is about to compute (section 3.3). At most one a direction.

        Args:
            layer: The next layer to compute.
            now: Seconds of any clock.

        Raises:
            InvariantError: Another layer is next, or the one before is not wholly on the GPU: it cannot have computed.
        """
        self._note_order(layer)
        swaps = (self._swap_in_hottest(layer, now), self._swap_out_coldest(layer, now))
        return tuple(swap for swap in swaps if swap is not None)

    def swap_ended(self, direction: Direction, now: float) -> int:
        """Confirm the swap of a direction: the second phase of the update of the table (section 3.2).

        Returns:
            The layer that was swapped. It is at the destination now, and its place at the source is free.

        Raises:
            InvariantError: No swap of that direction is under way.
        """
        if direction not in self._under_way:
            raise InvariantError(f"no {direction.value} swap is under way")
        layer = self._under_way.pop(direction)
        self._switch(self.table[layer], direction)
        self.table[layer].moving = None
        self.table[layer].changed_at_s = now
        return layer

    def _note_order(self, layer: int) -> None:
        """Out of order, the layer that computed last would not be the coldest, and a wait might not end."""
        if layer == self._layer:
            return
        if layer != (self._layer + 1) % self.num_layers:
            raise InvariantError(f"layer {layer} begins after layer {self._layer}")
        if self._layer >= 0 and not self.is_present(self._layer):
            raise InvariantError(f"layer {layer} begins, and layer {self._layer} cannot have computed")
        self._layer = layer

    # -- the protocol ----------------------------------------------------------------------------------------------

    def _swap_in_hottest(self, layer: int, now: float) -> Swap | None:
        """Swap in the layer on the CPU that computes soonest, if the last swap-in has ended and the GPU has a place."""
        if Direction.INBOUND in self._under_way or not self._free_gpu:
            return None
        upcoming = (*range(layer, self.num_layers), *range(layer))
        hottest = next((other for other in upcoming if self.table[other].is_on_cpu), None)
        return None if hottest is None else self._start(hottest, Direction.INBOUND, now)

    def _swap_out_coldest(self, layer: int, now: float) -> Swap | None:
        """Swap out the layer that computed last, if the last swap-out has ended and the CPU has a place.

        That layer is the coldest of all. If it is on the CPU, no layer on the GPU is colder than all on the CPU, and no
        swap-out begins: so in the first layer of Figure 4, where the last two are on the CPU at first.
        """
        coldest = (layer - 1) % self.num_layers
        if Direction.OUTBOUND in self._under_way or not self._free_cpu or coldest == layer:
            return None
        return self._start(coldest, Direction.OUTBOUND, now) if self.table[coldest].is_present else None

    def _start(self, layer: int, direction: Direction, now: float) -> Swap:
        """The first phase of the update of the table: the destination is allocated, and its pointer stored."""
        row = self.table[layer]
        if direction is Direction.INBOUND:
            row.gpu_place = self._free_gpu.pop()
        else:
            row.cpu_place = self._free_cpu.pop()
        row.moving, row.changed_at_s = direction, now
        self._under_way[direction] = layer
        assert row.gpu_place is not None and row.cpu_place is not None
        return Swap(layer, direction, row.gpu_place, row.cpu_place)

    def _switch(self, row: TableRow, direction: Direction) -> None:
        """Free the place at the source."""
        if direction is Direction.INBOUND:
            assert row.cpu_place is not None
            self._free_cpu.append(row.cpu_place)
            row.cpu_place = None
        else:
            assert row.gpu_place is not None
            self._free_gpu.append(row.gpu_place)
            row.gpu_place = None
