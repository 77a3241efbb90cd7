"""How many layers of an engine's KV stream: which places ``--kv-expansion`` allows, and changes by measured times."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.layer_places import MOST_SLOTS, LayerPlaces, every_place
from floodplain.core.sequence import Sequence
from floodplain.core.sizes import show_size
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import ExpansionFacts
from floodplain.engine.swap import PEER_LINK, emulated_bandwidth
from floodplain.memory.backend import Backend
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_slots import LayerSlots
from floodplain.policy.expansion import ExpansionLimit, ExpansionPolicy, ExpansionView
from floodplain.runtime.loop import Loop

_AUTO_SHARE = 4
"""With ``auto``, copies of layers take at most one part in so many of the free host memory."""
_FEWEST_SLOTS = 2
_FEWEST_LAYERS = _FEWEST_SLOTS + 1
"""Fewest layers of a model whose layers can stream: more layers than slots."""


@dataclass(frozen=True, slots=True)
class ExpansionPlan:
    """The places that an engine may use, by ascending expansion; it begins with the first.

    ``base_blocks`` are the pool's while no layer streams; else it has whole quanta of ``quantum_blocks``.
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
    """The places whose expansion (above 1) is nearest by ratio; ties go to three slots. UserError if none is."""
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
    """Plan the places that the flags ask for, for ``base_blocks`` without streamed layers. UserError if none fit."""
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


logger = logging.getLogger(__name__)

_SMOOTHING = 0.1
"""Weight of the newest step in the bandwidth of loads."""


class Expansion:
    """Applies an expansion policy. Call ``look`` at each boundary, and ``change`` if it returns True.

    Args:
        loop: Its ledger is the pool's, and its block tables are updated when blocks move.
        policy: Decides how many layers stream; None keeps the number.
        link_bytes_s: Expected bytes per second of loads, until loads are measured.
        near_bytes_s: The same of loads from near copies; None: as measured when the first one exists.
    """

    def __init__(
        self,
        slots: LayerSlots,
        loop: Loop,
        policy: ExpansionPolicy | None,
        plan: ExpansionPlan,
        link_bytes_s: float,
        near_bytes_s: float | None,
    ) -> None:
        self.slots = slots
        self._loop = loop
        self._policy = policy
        self._places = {places.num_streamed: places for places in plan.places}
        self._base_blocks = plan.base_blocks
        self._fewest = min((places.num_streamed for places in plan.places if places.num_streamed), default=0)
        self._home_bytes_s, self._near_bytes_s = link_bytes_s, near_bytes_s
        self._link_bytes_s = link_bytes_s
        self._seen = slots.line.stats()
        self._stall_s = slots.stall_s
        self._num_preempted = 0
        self._wanted = slots.places.num_streamed
        self._limited: str | None = None
        self._said: set[str | None] = {None}

    def look(self) -> bool:
        """Give the step that has ended to the policy; return whether ``change`` has something to do."""
        if self._policy is None:
            return False
        self._learn_bandwidth()
        step_s = self.slots.take_step_s()
        stall_s, self._stall_s = self.slots.stall_s - self._stall_s, self.slots.stall_s
        ledger = self._loop.state.ledger
        view = ExpansionView(
            step_s=step_s,
            stall_s=stall_s,
            copy_s=self.slots.step_bytes / self._link_bytes_s,
            num_streamed=self.slots.places.num_streamed,
            num_held_blocks=ledger.num_blocks - ledger.num_available,
            num_blocks=ledger.num_blocks,
            is_binding=self._is_binding(),
            fixed_s=self._loop.state.prices.now.lone_step_s or None,
        )
        decision = self._policy.decide(view)
        self._wanted = decision.num_streamed
        self._limited = None if decision.limited is None else decision.limited.value
        if self._limited not in self._said:
            self._said.add(self._limited)
            logger.info("KV expansion is %.2f: %s", self.slots.places.expansion, self._limited)
        return self._wanted != self.slots.places.num_streamed

    def change(self) -> None:
        """Stream as many layers as the policy decided. No step or copy of blocks may be outstanding."""
        before = self.slots.places
        try:
            self.slots.change_to(self._places[self._wanted], self._loop.state.ledger, self._loop.remap_blocks)
        except UserError as error:
            logger.warning("the KV pool keeps its expansion: %s", error)
            return
        if self.slots.places != before:
            logger.info(
                "KV expansion %.2f -> %.2f: %d layers stream",
                before.expansion, self.slots.places.expansion, self.slots.places.num_streamed,
            )  # fmt: skip

    def expect_bandwidth(self, bytes_s: float) -> None:
        """Set the expected bytes per second of loads from home, before any load was measured."""
        self._home_bytes_s = self._link_bytes_s = bytes_s

    @property
    def num_wanted_copies(self) -> int:
        """Near copies that can be used: of streamed layers, or of the smallest place if loads from home would stall."""
        num_streamed = self.slots.places.num_streamed
        would_show = not num_streamed and self._limited == ExpansionLimit.COPIES_SHOW.value
        return self._fewest if would_show else num_streamed

    def expect_copies(self, num_copies: int, measured_bytes_s: float) -> None:
        """Set the possible near copies and their measured bytes per second, used while no layer streams."""
        if not self.slots.places.num_streamed:
            has_enough = bool(self._fewest) and num_copies >= self._fewest
            near_bytes_s = self._near_bytes_s or measured_bytes_s
            self._link_bytes_s = near_bytes_s if has_enough else self._home_bytes_s

    def facts(self) -> ExpansionFacts:
        """The current state and counters; callable on any thread."""
        stats, places = self.slots.line.stats(), self.slots.places
        num_blocks = self._loop.state.ledger.num_blocks
        return ExpansionFacts(
            expansion=num_blocks / self._base_blocks if places.num_streamed else 1.0,
            num_streamed=places.num_streamed,
            loaded_bytes=stats.loaded_bytes,
            written_bytes=stats.written_bytes,
            stall_s=self.slots.stall_s,
            host_bytes=self.slots.home_bytes,
            num_near=len(self.slots.near.layers),
            near_loaded_bytes=stats.near_loaded_bytes,
            near_written_bytes=stats.near_written_bytes,
            block_bytes=self.slots.block_bytes,
            limited=self._limited,
        )

    def _learn_bandwidth(self) -> None:
        stats, seen = self.slots.line.stats(), self._seen
        self._seen = stats
        if stats.load_s > seen.load_s:
            measured = (stats.loaded_bytes - seen.loaded_bytes) / (stats.load_s - seen.load_s)
            self._link_bytes_s += _SMOOTHING * (measured - self._link_bytes_s)

    def _is_binding(self) -> bool:
        """Whether a sequence was preempted since the last call, or the first absent sequence lacks blocks."""
        state = self._loop.state
        num_preempted = sum(state.counters.preemptions.values())
        was_preempted, self._num_preempted = num_preempted > self._num_preempted, num_preempted
        absent: list[Sequence] = [*state.swapped[:1], *state.waiting.head()[:1]]
        if not absent or len(state.running) >= state.config.max_num_seqs:
            return was_preempted
        least = min(len(seq.tokens) for seq in absent) // state.ledger.block_tokens + 1
        return was_preempted or state.ledger.num_available < least + len(state.running)


def open_layer_slots(
    config: EngineConfig, plan: ExpansionPlan, pool: KVPool, ledger: BlockLedger, backend: Backend
) -> LayerSlots | None:
    """Open the layer slots of a pool with the plan's first place; None if no layer ever streams.

    Raises UserError if this kind of device streams no layers, or there is no memory for their copies.
    """
    if plan.is_off:
        return None
    line = backend.open_layer_line(pool.layout.num_layers)
    slots = LayerSlots(pool, line, plan.places[-1].num_slots, backend.open_layer_copy, backend.close_layer_copy)
    try:
        if config.hardware is not None:
            near_bytes_s = emulated_bandwidth(PEER_LINK, pool.layout)
            line.pace(emulated_bandwidth(config.hardware, pool.layout), near_bytes_s)
        slots.change_to(plan.places[0], ledger, lambda moved: None)  # no table exists yet
    except BaseException:
        slots.close()
        raise
    return slots


def open_expansion(
    config: EngineConfig, plan: ExpansionPlan, layout: KVLayout, slots: LayerSlots, loop: Loop
) -> Expansion:
    """Make the object that changes the expansion between steps."""
    policy = None if plan.is_fixed else ExpansionPolicy(plan.places, plan.base_blocks)
    home_bytes_s = slots.measure_bandwidth()
    near_bytes_s = None if config.hardware is None else emulated_bandwidth(PEER_LINK, layout)
    return Expansion(slots, loop, policy, plan, home_bytes_s, near_bytes_s)
