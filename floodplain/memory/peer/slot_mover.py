"""Copies slots between two tiers, beside everything else; each block is proven by its digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from floodplain.core.plan import Relocation
from floodplain.core.tiers import Direction, Tier
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import EMPTY_DIGEST, Slots, SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyEngine


class SlotStore:
    """Slots of one buffer as a ``BlockStore``: blocks of a single layer."""

    def __init__(self, slots: SwapSlots) -> None:
        self.layout = slots.layout
        self.words: tuple[torch.Tensor, ...] = (slots.words.view(slots.num_slots, -1),)
        self.slots = slots

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Raise ``InvariantError`` unless all numbers are of these slots."""
        self.slots.check(blocks)


@dataclass(frozen=True, slots=True)
class _Open:
    relocation: Relocation
    expected: np.ndarray


class SlotMover:
    """Copies between a buffer in this host's memory and slots elsewhere. One thread submits and polls.

    ``engine`` copies between ``SlotStore(host)`` and ``peer``; it is not yet started, and the mover owns it.
    """

    def __init__(self, host: SwapSlots, peer: Slots, engine: CopyEngine[Any]) -> None:
        self._host, self._peer = host, peer
        self._engine = engine
        self._open: dict[int, _Open] = {}
        self.moved_bytes = {Tier.HOST: 0, Tier.PEER: 0}
        """Bytes copied so far, by the tier that they were copied to."""

    @property
    def layout(self) -> KVLayout:
        """Shape of the blocks."""
        return self._host.layout

    def start(self) -> Self:
        """Start the copy engine; returns the mover."""
        self._engine.start()
        return self

    def submit(self, relocation: Relocation) -> None:
        """Begin a relocation, and return at once."""
        to_peer = relocation.targets[0].tier is Tier.PEER
        far, near = (relocation.targets, relocation.sources) if to_peer else (relocation.sources, relocation.targets)
        direction = Direction.OUTBOUND if to_peer else Direction.INBOUND
        copy = BlockCopy(direction, tuple(one.slot for one in near), tuple(one.slot for one in far))
        expected = self._host.digests[list(copy.blocks)] if to_peer else self._peer.digests[list(copy.slots)]
        self._open[relocation.relocation_id] = _Open(relocation, expected)
        self._engine.submit(relocation.relocation_id, copy)

    def poll(self) -> list[tuple[int, Sequence[int]]]:
        """Ended relocations: (id, places in ``Relocation.sources`` of blocks that did not arrive whole, ascending)."""
        return [self._settle(result.transfer_id, result.digests) for result in self._engine.poll()]

    def close(self) -> None:
        """Let the copies in flight end, then stop."""
        self._engine.close()

    def _settle(self, relocation_id: int, digests: Sequence[int]) -> tuple[int, Sequence[int]]:
        """End a relocation: a block is whole if its copy has the digest that was stored when it left the device."""
        one = self._open.pop(relocation_id)
        found = np.asarray(digests, dtype=np.int64)
        is_whole = (found == one.expected) & (found != EMPTY_DIGEST)
        target = one.relocation.targets[0].tier
        slots = np.array([location.slot for location in one.relocation.targets], dtype=np.int64)
        if target is Tier.HOST:
            self._host.digests[slots] = np.where(is_whole, found, EMPTY_DIGEST)
        else:  # the copy itself stored the digests of whole ones
            self._peer.digests[slots[~is_whole]] = EMPTY_DIGEST
        self.moved_bytes[target] += len(slots) * self.layout.block_bytes
        return relocation_id, np.flatnonzero(~is_whole).tolist()
