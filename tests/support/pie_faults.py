"""Pie's rule with one fault each, which a law must find."""

from __future__ import annotations

from benchmarks.expansion.pie_fifo import PieFifo, Swap
from floodplain.core.tiers import Direction


class SwitchesAtStart(PieFifo):
    """The table reports a layer as present from the beginning of its swap: one phase instead of two."""

    def is_present(self, layer: int) -> bool:
        return self.table[layer].gpu_place is not None


class FreesAtStart(PieFifo):
    """A swap-out's place on the GPU is reused before the copy from it has ended."""

    def _start(self, layer: int, direction: Direction, now: float) -> Swap:
        swap = super()._start(layer, direction, now)
        if direction is Direction.OUTBOUND:
            self._free_gpu.append(swap.gpu_place)
        return swap

    def swap_ended(self, direction: Direction, now: float) -> int:
        layer = super().swap_ended(direction, now)
        if direction is Direction.OUTBOUND:
            self._free_gpu.pop()
        return layer


class FetchesTheColdest(PieFifo):
    """Swaps the coldest layer in first."""

    def _swap_in_hottest(self, layer: int, now: float) -> Swap | None:
        if Direction.INBOUND in self._under_way or not self._free_gpu:
            return None
        upcoming = [(layer + distance) % self.num_layers for distance in range(self.num_layers)]
        coldest = next((other for other in reversed(upcoming) if self.table[other].is_on_cpu), None)
        needs = not self.table[layer].is_present and self.table[layer].is_on_cpu
        return None if coldest is None else self._start(layer if needs else coldest, Direction.INBOUND, now)


class EvictsTheHottest(PieFifo):
    """Swaps out the layer that computes next but one."""

    def _swap_out_coldest(self, layer: int, now: float) -> Swap | None:
        if Direction.OUTBOUND in self._under_way or not self._free_cpu:
            return None
        after = [(layer + distance) % self.num_layers for distance in range(1, self.num_layers)]
        hottest = next((other for other in after if self.table[other].is_present), None)
        return None if hottest is None else self._start(hottest, Direction.OUTBOUND, now)


class SwapsTwoAtOnce(PieFifo):
    """A swap-out begins before the last one has ended."""

    def _swap_out_coldest(self, layer: int, now: float) -> Swap | None:
        last = self._under_way.pop(Direction.OUTBOUND, None)
        swap = super()._swap_out_coldest(layer, now)
        if swap is None and last is not None:
            self._under_way[Direction.OUTBOUND] = last
        return swap
