"""The KV of a member of a group: arenas of its kept layers, and of layers whose KV is leaving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from floodplain.core.errors import InvariantError
from floodplain.memory.arena import Device, Page
from floodplain.memory.group_arena import GroupArena
from floodplain.memory.group_places import GroupPlaces, LayerPages
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.layer_tensors import LayerTensors


class GroupKV:
    """Arenas by layer; pages come from the caller and return to it. One thread at a time.

    Args:
        device: Where the pages come from.
        layout: Shape of the whole model's KV.

    Attributes:
        arenas: Arenas of the kept layers, all with the same quanta.
        leaving: Arenas of other layers, until their KV is unmapped.
        layers: The kept layers for compute, looked up anew at each access.
        max_quanta: Group quanta that the kept layers have addresses for.
    """

    def __init__(self, device: Device, layout: KVLayout) -> None:
        self._device, self._layout = device, layout
        self.arenas: dict[int, GroupArena] = {}
        self.leaving: dict[int, GroupArena] = {}
        self.layers = GroupLayers(layout.num_layers, self.arenas)
        self.max_quanta = 0

    @property
    def quanta(self) -> tuple[int, ...]:
        """Quanta that have memory in the kept layers, ascending."""
        return tuple(sorted(min(self.arenas.items())[1].pages)) if self.arenas else ()

    @property
    def num_leaving_quanta(self) -> int:
        """Quanta of leaving layers, counted for each layer."""
        return sum(len(arena.pages) for arena in self.leaving.values())

    def find_held(self) -> LayerPages:
        """Pages of the kept layers, by layer and quantum."""
        return {layer: dict(arena.pages) for layer, arena in self.arenas.items()}

    def place(self, places: GroupPlaces, max_quanta: int, first_leaving: int) -> None:
        """Map pages in new arenas, then close the old ones. Until then other arenas may map the same pages, too.

        Nothing is unmapped before everything is mapped, and undoing a failure cannot fail: an unmap is never refused.

        Args:
            places: The pages.
            max_quanta: Quanta that the kept layers' arenas have room for.
            first_leaving: First group quantum of leaving layers.

        Raises:
            UserError: The system's limit on mappings is reached; the old arenas stay.
        """
        num_leaving = max((len(quanta) for quanta in places.leaving.values()), default=0)
        with ExitStack() as on_failure:
            arenas = self._open(places.kept, max_quanta, 0, on_failure)
            leaving = self._open(places.leaving, num_leaving, first_leaving, on_failure)
            on_failure.pop_all()
        self.empty()
        self.arenas.update(arenas)
        self.leaving, self.max_quanta = leaving, max_quanta

    def grow(self, quanta: Sequence[int], pages: Sequence[Page]) -> None:
        """Put pages behind empty quanta of all kept layers, layer by layer, or behind none.

        Raises:
            UserError: The system's limit on mappings is reached; nothing changed.
        """
        rest, each = iter(pages), len(pages) // max(1, len(self.arenas) * len(quanta))
        with ExitStack() as on_failure:
            for arena in self.arenas.values():
                arena.map({quantum: [next(rest) for _ in range(each)] for quantum in quanta})
                on_failure.callback(arena.unmap, quanta)
            on_failure.pop_all()

    def shrink(self, moves: Sequence[tuple[int, int]], quanta: Sequence[int]) -> list[Page]:
        """Copy blocks (source, destination) in the kept layers, then unmap quanta; returns their pages."""
        blocks = [block for move in moves for block in move]
        if not all(arena.is_backed(blocks) for arena in self.arenas.values()):
            raise InvariantError("blocks of a group move that have no memory")
        if len({*blocks}) < len(blocks):
            raise InvariantError("a block is moved twice, or onto another that moves")
        for arena in self.arenas.values():
            arena.move_blocks(moves)
        unmapped = [arena.unmap(quanta) for arena in self.arenas.values()]
        return [page for each in unmapped for pages in each.values() for page in pages]

    def find(self, layer: int, blocks: Sequence[int]) -> GroupArena | None:
        """The arena with these blocks of a layer, kept or leaving; None if any has no memory here."""
        arena = self.arenas.get(layer) or self.leaving.get(layer)
        return arena if arena is not None and arena.is_backed(blocks) else None

    def empty_leaving(self) -> list[Page]:
        """Unmap and return the pages of leaving layers, and close their arenas."""
        pages = [page for arena in self.leaving.values() for page in arena.empty()]
        self.leaving = {}
        return pages

    def empty(self) -> list[Page]:
        """Unmap and return all pages, and close all arenas."""
        pages = [page for arena in self.arenas.values() for page in arena.empty()]
        self.arenas.clear()
        self.max_quanta = 0
        return pages + self.empty_leaving()

    def find_pages(self) -> list[Page]:
        """All pages that these arenas map."""
        arenas = [*self.arenas.values(), *self.leaving.values()]
        return [page for arena in arenas for pages in arena.pages.values() for page in pages]

    def _open(
        self, pages: LayerPages, num_quanta: int, first_quantum: int, on_failure: ExitStack
    ) -> dict[int, GroupArena]:
        arenas = {}
        for layer, quanta in pages.items():
            arenas[layer] = arena = GroupArena(self._device, self._layout, num_quanta, first_quantum)
            on_failure.callback(arena.empty)
            arena.map(quanta)
        return arenas


class GroupLayers(LayerTensors):
    """KV of the kept layers by their index in the whole model; other layers are refused.

    Args:
        num_layers: Of the whole model.
        arenas: The kept layers' arenas by index, looked up anew at each access.
    """

    def __init__(self, num_layers: int, arenas: Mapping[int, GroupArena]) -> None:
        self._num_layers = num_layers
        self._arenas = arenas

    def __len__(self) -> int:
        return self._num_layers

    def tensor_of(self, layer: int) -> torch.Tensor:
        """The tensor of a kept layer; any other layer raises ``InvariantError``."""
        arena = self._arenas.get(layer)
        if arena is None:
            raise InvariantError(f"the KV of layer {layer} is with another member of the group")
        return arena.tensor
