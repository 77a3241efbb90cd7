"""What is compared: the same engine with another number of layers that stream, or another way to stream them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.memory.layer_slots import LayerSlots


class OnDemand(LayerSlots):
    """FlexGen's way: a layer is loaded when it is to compute, and compute waits for all of it."""

    def _load(self, layer: int) -> None:
        """Nothing ahead."""

    def before_layer(self, index: int) -> None:
        """See ``LayerSlots``."""
        if self.places.slot_of(index) is not None:
            super()._load(index)
        super().before_layer(index)


class WholeLayers(LayerSlots):
    """Pie's way of moving: what the step read and wrote of a layer goes out whole, since no copy stays behind.

    Layers pass through the slots in the order of ``LayerSlots``; Pie's own order is in ``policy.pie_fifo``.
    """

    def begin_step(self, read_blocks: np.ndarray, written_tokens: np.ndarray) -> None:
        """See ``LayerSlots``."""
        super().begin_step(read_blocks, written_tokens)
        blocks = np.union1d(read_blocks, written_tokens // self._pool.layout.block_tokens)
        self._whole = blocks * self._block_bytes

    def after_layer(self, index: int) -> None:
        """See ``LayerSlots``."""
        rows, self._rows = self._rows, self._whole
        row_bytes, self._row_bytes = self._row_bytes, self._block_bytes
        super().after_layer(index)
        self._rows, self._row_bytes = rows, row_bytes


@dataclass(frozen=True, slots=True)
class Way:
    """One arm.

    Attributes:
        name: In tables.
        expansion: ``--kv-expansion``.
        pool: Times the device memory of the others.
        kind: How layers stream; None: as the engine does.
    """

    name: str
    expansion: str = "off"
    pool: float = 1.0
    kind: type[LayerSlots] | None = None

    def open(self, kv_memory: int, link_bytes_s: float, **flags: Any) -> Engine:
        """An engine of this way, behind a link of so many bytes per second (0: as fast as this machine copies)."""
        config = EngineConfig(
            model="smollm2", kv_memory=round(self.pool * kv_memory), kv_expansion=self.expansion, max_num_seqs=64,
            expansion_memory=None if self.expansion == "off" else 2**32, **flags,
        )  # fmt: skip
        engine = build_engine(config)
        if engine.expansion is not None:
            slots: Any = engine.expansion.slots
            slots.line.pace(link_bytes_s, link_bytes_s)
            if link_bytes_s:
                engine.expansion.expect_bandwidth(link_bytes_s)
            if self.kind is not None:
                slots.__class__ = self.kind
        return engine


FACTORS = ("1.5", "2", "3", "4.3")
WAYS = {
    way.name: way
    for way in (
        Way("recompute"),
        *(Way(f"{factor}x", factor) for factor in FACTORS),
        Way("auto", "auto"),
        *(Way(f"{factor}x on demand", factor, kind=OnDemand) for factor in FACTORS),
        *(Way(f"{factor}x whole layers", factor, kind=WholeLayers) for factor in FACTORS),
        *(Way(f"pool of {factor}x", pool=float(factor)) for factor in FACTORS),
    )
}
