"""Serves a member's swap space while its engine is at rest, to other members of its group and to itself.

A slot is read only after its content was verified against the digest that was taken at swap-out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import torch

from floodplain.cluster.bulk.kv_copies import SWAP, ByteArray, IntArray, RequestCopy, Writer
from floodplain.cluster.bulk.stores import NotServed
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots


class SwapStore:
    """A ``bulk_stores.Store`` over swap space: part = layer, indices = slots.

    Args:
        slots: Slots in host memory; none is written between ``forget`` and the last ``read``.
    """

    def __init__(self, slots: SwapSlots) -> None:
        layout = slots.layout
        self._slots = slots
        self._weights = compute_weights(layout.num_layers * layout.layer_block_words)
        self._proven: set[int] = set()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget which slots were verified: they may have been written since."""
        with self._lock:
            self._proven.clear()

    def read(self, part: int, indices: IntArray) -> ByteArray:
        """One layer of some slots: uint8 [num_indices, layer_block_bytes].

        Raises:
            NotServed: There is no such layer or slot, or a slot's content does not match its digest.
        """
        slots = indices.tolist()
        is_there = 0 <= part < self._slots.layout.num_layers and all(0 <= s < self._slots.num_slots for s in slots)
        if not is_there or not self._prove(slots):
            raise NotServed(f"swap space has not layer {part} of slots {slots[:8]}, or not as it was written")
        words: IntArray = self._slots.words[torch.from_numpy(indices), part].numpy()
        return words.view(np.uint8)

    def _prove(self, slots: Iterable[int]) -> bool:
        with self._lock:
            return all(slot in self._proven or self._prove_one(slot) for slot in slots)

    def _prove_one(self, slot: int) -> bool:
        expected = int(self._slots.digests[slot])
        words = self._slots.part(slot, 1).numpy().reshape(1, -1)
        is_whole = expected != EMPTY_DIGEST and int(compute_digests(words, self._weights)[0]) == expected
        if is_whole:
            self._proven.add(slot)
        return is_whole


def copy_slots(swap: SwapStore | None, layers: Iterable[int], one: RequestCopy, write: Writer) -> bool:
    """Copy what a request has in the own swap space. True if all of it was there and verified."""
    if swap is None:
        return False
    targets = one.find_targets().get(SWAP, {})
    slots = np.array([*targets], dtype=np.int64)
    try:
        return all(write(layer, [*targets.values()], swap.read(layer, slots)) for layer in layers)
    except NotServed:
        return False
