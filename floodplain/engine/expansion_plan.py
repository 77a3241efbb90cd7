"""Plans which places ``--kv-expansion`` allows for one model and pool: how many layers may stream."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.core.layer_places import MOST_SLOTS, LayerPlaces, every_place
from floodplain.core.sizes import show_size
from floodplain.engine.config import EngineConfig
from floodplain.memory.kv_layout import KVLayout

_AUTO_SHARE = 4
"""With ``auto``, copies of layers take at most one part in so many of the free host memory."""
_FEWEST_SLOTS = 2
_FEWEST_LAYERS = _FEWEST_SLOTS + 1
"""Fewest layers of a model whose layers can stream: more layers than slots."""


@dataclass(frozen=True, slots=True)
class ExpansionPlan:
    """The places that an engine may use, by ascending expansion; it begins with the first.

    Attributes:
        base_blocks: Blocks of the pool while no layer streams.
        quantum_blocks: Blocks of a quantum; the pool has whole quanta while any layer streams.
    """

    base_blocks: int
    quantum_blocks: int
    places: tuple[LayerPlaces, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether there is a single place, so that nothing changes while the engine runs."""
        return len(self.places) == 1

    @property
    def is_off(self) -> bool:
        """Whether no layer ever streams."""
        return self.places[-1].num_streamed == 0

    @property
    def sure_blocks(self) -> int:
        """Blocks of the pool in its first place, to which it can always return: the most for one request."""
        first = self.places[0]
        return self.base_blocks if self.is_off else count_blocks(first, self.base_blocks, self.quantum_blocks)

    @property
    def most_blocks(self) -> int:
        """Most blocks of the pool in any place, for which address space is needed."""
        last, rounded = self.places[-1], -(-self.base_blocks // self.quantum_blocks) * self.quantum_blocks
        return self.base_blocks if self.is_off else rounded * last.num_layers // last.num_arenas


def count_blocks(places: LayerPlaces, base_blocks: int, quantum_blocks: int) -> int:
    """Blocks, in whole quanta, that the memory of ``base_blocks`` unexpanded blocks holds with these places."""
    return base_blocks * places.num_layers // places.num_arenas // quantum_blocks * quantum_blocks


def place_for(expansion: float, num_layers: int) -> LayerPlaces:
    """The places whose expansion (above 1) is nearest by ratio; ties go to three slots.

    Raises UserError if the model has too few layers; it must have at least three.
    """
    most = num_layers / _FEWEST_SLOTS
    if expansion > most:
        raise UserError(
            f"--kv-expansion {expansion:g} is beyond what {num_layers} layers allow: at most {most:g} (two slots)"
        )
    possible = (
        places
        for num_slots in range(MOST_SLOTS, _FEWEST_SLOTS - 1, -1)
        for places in every_place(num_layers, num_slots)
        if places.num_streamed
    )
    return min(possible, key=lambda places: max(places.expansion / expansion, expansion / places.expansion))


def plan_expansion(
    config: EngineConfig, layout: KVLayout, base_blocks: int, quantum_blocks: int, available_bytes: int
) -> ExpansionPlan:
    """Plan the places that the flags ask for, for a pool of ``base_blocks`` while no layer streams.

    Raises UserError if the model, the pool or the free host memory (``available_bytes``) does not allow them.
    """
    asked = config.asked_expansion
    if asked == 1.0:
        return ExpansionPlan(base_blocks, quantum_blocks, (LayerPlaces(layout.num_layers),))
    if layout.num_layers < _FEWEST_LAYERS:
        raise UserError(
            f"--kv-expansion {config.kv_expansion} needs a model of at least {_FEWEST_LAYERS} layers, and this one has "
            f"{layout.num_layers}: leave it out"
        )
    if asked is not None:
        places = place_for(asked, layout.num_layers)
        _expect_memory(config, layout, places, base_blocks, available_bytes)
        return ExpansionPlan(base_blocks, quantum_blocks, (places,))
    return _plan_auto(config, layout, base_blocks, quantum_blocks, available_bytes)


def _plan_auto(
    config: EngineConfig, layout: KVLayout, base_blocks: int, quantum_blocks: int, available_bytes: int
) -> ExpansionPlan:
    num_slots = min(MOST_SLOTS, layout.num_layers - 1)
    most_bytes = config.expansion_memory or available_bytes // _AUTO_SHARE
    possible = [
        places
        for places in every_place(layout.num_layers, num_slots)
        if _home_bytes(layout, places, base_blocks) <= most_bytes
    ]
    if len(possible) == 1:
        least = next(places for places in every_place(layout.num_layers, num_slots) if places.num_streamed)
        needed = show_size(_home_bytes(layout, least, base_blocks))
        raise UserError(
            f"--kv-expansion auto needs {needed} of host memory for {least.num_streamed} layers, and may take "
            f"{show_size(most_bytes)}: raise --expansion-memory, or lower --kv-memory"
        )
    if not config.long_prompts:
        return ExpansionPlan(base_blocks, quantum_blocks, tuple(possible))
    assert config.max_model_len is not None
    wanted = -(-config.max_model_len // config.block_tokens)
    enough = [places for places in possible if count_blocks(places, base_blocks, quantum_blocks) >= wanted]
    if not enough:
        most = count_blocks(possible[-1], base_blocks, quantum_blocks) * config.block_tokens
        raise UserError(
            f"--max-model-len {config.max_model_len} does not fit: expanded, the KV pool holds {most} tokens; raise "
            "--kv-memory or --expansion-memory, or lower --max-model-len"
        )
    return ExpansionPlan(base_blocks, quantum_blocks, tuple(enough))


def _expect_memory(
    config: EngineConfig, layout: KVLayout, places: LayerPlaces, base_blocks: int, available_bytes: int
) -> None:
    needed = _home_bytes(layout, places, base_blocks)
    limit = available_bytes if config.expansion_memory is None else min(config.expansion_memory, available_bytes)
    if needed > limit:
        raise UserError(
            f"--kv-expansion {config.kv_expansion} needs {show_size(needed)} of host memory for the copies of "
            f"{places.num_streamed} layers, and {show_size(limit)} may be taken: lower it, lower --kv-memory, or "
            "raise --expansion-memory"
        )


def _home_bytes(layout: KVLayout, places: LayerPlaces, base_blocks: int) -> int:
    """Bytes of host memory for the copies of layers that stream."""
    num_blocks = base_blocks * places.num_layers // places.num_arenas
    return places.num_streamed * num_blocks * layout.layer_block_bytes
