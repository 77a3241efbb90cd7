"""The place of each layer's KV while some layers stream: on the device, or in which slot. Pure.

Of n layers, m *stream*: each has a complete copy off the device, and is on it only while it is needed. They share S
*slots*, each as large as one layer; so r = n - m + S layers' worth of device memory hold e = n / r times as many blocks
(*expansion*). When a layer has computed, its slot is loaded with its *follower*, S streamed layers further on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from floodplain.core.errors import InvariantError

MOST_SLOTS = 3
"""While one slot is computed on and one is loaded, the link still has work in the third where streamed layers are
neighbours: with two, as much as a quarter of the link is lost, with three at most 4 %."""


_LATE_SHARE = 10
"""One part in so many of the layers streams last: the first ones. Loads begin when a step begins, so that a layer near
its begin cannot hide. If layer 0 streamed first, up to 10 % of the tokens per second were lost, with this at most 5 %,
and stalls of less than 1 % leave 94 % instead of 49 % (``cost.expansion``, 30 to 80 layers)."""


def stream_order(num_layers: int) -> tuple[int, ...]:
    """The order in which layers begin to stream: by their bit-reversed numbers, counted from the last one.

    The first m are spread nearly evenly for each m, so that their loads are spread over the step, and one more of them
    moves no other one. The first layers of the model come last, layer 0 at the end.
    """
    num_late = max(1, num_layers // _LATE_SHARE)
    num_spread = num_layers - num_late
    num_bits = max(1, (num_spread - 1).bit_length())
    reversed_numbers = (int(f"{number:0{num_bits}b}"[::-1], 2) for number in range(2**num_bits))
    spread = tuple(num_layers - 1 - number for number in reversed_numbers if number < num_spread)
    return spread + tuple(range(num_late - 1, -1, -1))


@dataclass(frozen=True)
class LayerPlaces:
    """Which of ``num_layers`` (n) layers stream, and which slot each uses. InvariantError for impossible places.

    ``num_streamed``: m. 0, or more than ``num_slots``: fewer would be loaded into the slots that they left.
    ``num_slots``: S. While any layer streams, the arenas of the first S layers of ``stream_order`` are the slots.
    """

    num_layers: int
    num_streamed: int = 0
    num_slots: int = MOST_SLOTS

    def __post_init__(self) -> None:
        if self.num_streamed and not 2 <= self.num_slots < self.num_streamed <= self.num_layers:
            raise InvariantError(f"{self.num_streamed} of {self.num_layers} layers stream through {self.num_slots}")

    @property
    def num_arenas(self) -> int:
        """r: layers' worth of device memory."""
        return self.num_layers - self.num_streamed + (self.num_slots if self.num_streamed else 0)

    @property
    def expansion(self) -> float:
        """e = n / r: how many times as many blocks the same memory holds."""
        return self.num_layers / self.num_arenas

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The layers that stream, in the order in which they compute."""
        return tuple(sorted(stream_order(self.num_layers)[: self.num_streamed]))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The layers whose arenas are the slots."""
        return stream_order(self.num_layers)[: self.num_slots] if self.num_streamed else ()

    @cached_property
    def arenas(self) -> tuple[int, ...]:
        """The layers whose arenas have pages, in ascending order: those that stay, and the slots."""
        return tuple(sorted({*range(self.num_layers)} - {*self.streamed} | {*self.slots}))

    @cached_property
    def _turns(self) -> dict[int, int]:
        return {layer: turn for turn, layer in enumerate(self.streamed)}

    def slot_of(self, layer: int) -> int | None:
        """The place in ``slots`` through which a layer passes; None if it stays on the device."""
        turn = self._turns.get(layer)
        return None if turn is None else turn % self.num_slots

    def arena_of(self, layer: int) -> int:
        """The layer whose arena a layer is computed in: its own, or its slot's."""
        slot = self.slot_of(layer)
        return layer if slot is None else self.slots[slot]

    @property
    def first(self) -> tuple[int, ...]:
        """The layers that are loaded when a step begins: all slots are free then."""
        return self.streamed[: self.num_slots]

    def follower(self, layer: int) -> int | None:
        """The layer that is loaded into a layer's slot when it has computed; None if no more is needed in this step."""
        turn = self._turns[layer] + self.num_slots
        return self.streamed[turn] if turn < self.num_streamed else None


def every_place(num_layers: int, num_slots: int = MOST_SLOTS) -> Iterator[LayerPlaces]:
    """All places that a model can have, by ascending expansion, from no streams on."""
    yield LayerPlaces(num_layers, 0, num_slots)
    for num_streamed in range(num_slots + 1, num_layers + 1):
        yield LayerPlaces(num_layers, num_streamed, num_slots)
