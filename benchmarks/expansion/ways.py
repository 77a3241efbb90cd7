"""What is compared: the same engine with another number of layers that stream, or another way to stream them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.expansion.pie_layers import TwoWayLine, move_whole_layers
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.expansion import Expansion
from floodplain.engine.shell import Engine
from floodplain.memory.host.layer_line import open_layer_line
from floodplain.memory.layer_slots import LayerSlots


class OnDemand(LayerSlots):
    """FlexGen's way: a layer is loaded when it is to compute, and compute waits for all of it."""

    def _load(self, layer: int) -> None:
        """Nothing ahead."""

    def before_layer(self, index: int) -> None:
        """Load the layer, and wait for all of it."""
        if self.places.slot_of(index) is not None:
            super()._load(index)
        super().before_layer(index)


def load_on_demand(engine: Engine, expansion: Expansion) -> None:
    """Let layers be loaded when they are to compute."""
    slots: Any = expansion.slots
    slots.__class__ = OnDemand


def move_by_fifo(engine: Engine, expansion: Expansion, *, is_shared: bool) -> None:
    """Let whole layers move both ways, over two links or a shared one."""
    num_layers = expansion.slots.places.num_layers
    line = TwoWayLine(open_layer_line(num_layers), open_layer_line(num_layers), is_shared=is_shared)
    move_whole_layers(expansion.slots, engine.loop.state.ledger, line)


@dataclass(frozen=True, slots=True)
class Way:
    """One arm: a value of ``--kv-expansion``, and the device memory as a multiple of the others'.

    ``change`` tells how layers stream; None: as the engine does.
    """

    name: str
    expansion: str = "off"
    pool: float = 1.0
    change: Callable[[Engine, Expansion], None] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def open(self, kv_memory: int, link_bytes_s: float, **flags: Any) -> Engine:
        """An engine of this way, behind a link of so many bytes per second (0: as fast as this machine copies)."""
        config = EngineConfig(
            model="smollm2", kv_memory=round(self.pool * kv_memory), kv_expansion=self.expansion, max_num_seqs=64,
            expansion_memory=None if self.expansion == "off" else 2**32, **{**flags, **self.flags},
        )  # fmt: skip
        engine = build_engine(config)
        if engine.expansion is not None:
            if self.change is not None:
                self.change(engine, engine.expansion)
            engine.expansion.slots.line.pace(link_bytes_s, link_bytes_s)
            if link_bytes_s:
                engine.expansion.expect_bandwidth(link_bytes_s)
        return engine


FACTORS = ("1.5", "2", "3", "4.3")
_HELD_ALONE = {"enable_prefix_caching": False}
"""What Pie moves is what sequences hold; blocks kept for later prompts would only be ballast to it."""


def _pie(factor: str, kind: str, *, is_shared: bool) -> Way:
    return Way(f"{factor}x {kind}", factor, change=partial(move_by_fifo, is_shared=is_shared), flags=_HELD_ALONE)


WAYS = {
    way.name: way
    for way in (
        Way("recompute"),
        *(Way(f"{factor}x", factor) for factor in FACTORS),
        Way("auto", "auto"),
        *(Way(f"{factor}x on demand", factor, change=load_on_demand) for factor in FACTORS),
        *(_pie(factor, "Pie", is_shared=False) for factor in FACTORS),
        *(_pie(factor, "Pie, shared link", is_shared=True) for factor in FACTORS),
        *(Way(f"pool of {factor}x", pool=float(factor)) for factor in FACTORS),
    )
}
