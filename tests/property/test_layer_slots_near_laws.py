"""Near copies come and go among steps, swap-ins, moves and changes of places: every read has the oracle's bytes.

A near copy has invalid bytes when it is added and after its ``drop`` has returned: reads of a stale block or of removed
memory fail the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.core.errors import InvariantError
from floodplain.memory.host.device import HostDevice
from floodplain.memory.host.layer_line import PythonLayerLine, open_layer_line
from floodplain.memory.layer_line import LayerLine
from floodplain.memory.layer_slots import LayerSlots, NearCopies
from tests.property.test_layer_slots_laws import LAYOUT, PLACES, World, act, world
from tests.support.examples import examples
from tests.support.layer_lines import OrderedLine

SPOILT = -7
NUM_LAYERS = LAYOUT.num_layers


class DisturbedSlots(LayerSlots):
    """Slots that call ``disturb`` between any two layers."""

    disturb: Callable[[], None] = staticmethod(lambda: None)

    def before_layer(self, index: int) -> None:
        self.disturb()
        super().before_layer(index)

    def after_layer(self, index: int) -> None:
        self.disturb()
        super().after_layer(index)


class NearWorld(World):
    """A world with near copies, and with swap-ins that write blocks of the host copies."""

    def __init__(self, device: HostDevice, line: LayerLine, seed: int, kind: type[LayerSlots]) -> None:
        super().__init__(device, line, seed, kind)
        self.memory: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()
        self.num_dropped = 0
        if isinstance(self.slots, DisturbedSlots):
            self.slots.disturb = self.disturb

    def disturb(self) -> None:
        """Drop a near copy at random, as a thread may on a recall."""
        if self.memory and self.rng.random() < 0.03:
            self.drop(self.rng.choice(sorted(self.memory) or [0]))

    def add_near(self) -> None:
        lacking = sorted({*self.slots.places.streamed} - self.slots.near.layers)
        if lacking:
            layer = self.rng.choice(lacking)
            words = torch.full_like(self.slots._homes[layer], SPOILT)
            with self.lock:
                self.slots.near.add(layer, words)
                self.memory[layer] = words

    def drop(self, layer: int) -> None:
        with self.lock:
            words = self.memory.pop(layer, None)
            self.slots.near.drop(layer)
        if words is not None:
            words.fill_(SPOILT)
            self.num_dropped += 1

    def swap(self, index: int) -> None:
        """A sequence is swapped out and swapped in to other blocks, while others may compute."""
        self.slots.settle()
        content = [words[self.tables[index]].clone() for words in self.pool.words]
        self.ledger.free(self.tables[index])  # type: ignore[arg-type]
        new = self.ledger.allocate(len(self.tables[index]))
        assert new is not None
        self.rng.shuffle(new)
        self.slots.near.note_changed(new)
        others = [other for other in range(len(self.tables)) if other != index]
        self.tables[index] = list(new)
        if others:
            self.step(dict.fromkeys(others, 1))
        for words, part in zip(self.pool.words, content, strict=True):
            words[list(new)] = part

    def check(self) -> None:
        """Also: a near copy has every token that is not in a stale block; only streamed layers have near copies."""
        super().check()
        for layer in {*self.memory} - self.slots.near.layers:
            self.drop(layer)
        assert self.slots.near.layers <= {*self.slots.places.streamed}
        with self.lock:
            for layer, words in self.memory.items():
                is_stale = self.slots.near._is_stale[layer]
                self.kv = words.view(torch.int16).view(self.pool.max_blocks, *LAYOUT.block_shape)
                for index, length in enumerate(self.lengths):
                    for position in range(length):
                        if not is_stale[self.tables[index][position // LAYOUT.block_tokens]]:
                            self.expect(index, position, layer)


def live_near(one: World, num_actions: int) -> None:
    """See ``live``; also adds and drops near copies and swaps at every boundary."""
    assert isinstance(one, NearWorld)
    one.change(PLACES[one.rng.randrange(1, len(PLACES))])
    for _ in range(num_actions):
        act(one)
        action = one.rng.choice(["add", "add", "add", "drop", "swap", None, None])
        if action == "add":
            one.add_near()
        elif action == "drop":
            one.drop(one.rng.choice(sorted(one.memory) or [0]))
        elif action == "swap" and one.tables:
            one.swap(one.rng.randrange(len(one.tables)))
    one.check()


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(6))
def test_what_a_step_reads_is_what_was_written_whichever_copies_there_are(seed: int, is_late: bool) -> None:
    line = OrderedLine(NUM_LAYERS, is_late=is_late)
    with world(line, seed, DisturbedSlots, NearWorld) as one:
        live_near(one, 20)


def test_near_copies_are_used() -> None:
    line = OrderedLine(NUM_LAYERS)
    with world(line, 1, DisturbedSlots, NearWorld) as one:
        live_near(one, 70)
        stats = line.stats()
        assert 0.1 * stats.loaded_bytes < stats.near_loaded_bytes < stats.loaded_bytes
        assert isinstance(one, NearWorld) and one.num_dropped > 5


@pytest.mark.parametrize("is_native", [True, False])
def test_a_copy_that_another_thread_has_dropped_never_shows_in_a_load(is_native: bool) -> None:
    """Its bytes are overwritten as soon as ``drop`` returns, while the line copies."""
    for seed in range(4):
        line = open_layer_line(NUM_LAYERS) if is_native else PythonLayerLine(NUM_LAYERS)
        line.pace(2e8 * (seed % 2), 1e9)
        with world(line, seed, LayerSlots, NearWorld) as one:
            assert isinstance(one, NearWorld)
            is_over = threading.Event()

            def take_away(there: NearWorld, is_over: threading.Event, rng: Random) -> None:
                while not is_over.is_set():
                    there.drop(rng.randrange(NUM_LAYERS))

            thread = threading.Thread(target=take_away, args=(one, is_over, Random(seed)))
            thread.start()
            try:
                live_near(one, 20)
            finally:
                is_over.set()
                thread.join()


def test_a_layer_that_does_not_stream_has_no_near_copy() -> None:
    with world(OrderedLine(NUM_LAYERS), 0) as one:
        words = one.pool.words[0]
        with pytest.raises(InvariantError, match="cannot have a near copy"):
            one.slots.near.add(0, words)
        one.change(PLACES[-1])
        with pytest.raises(InvariantError, match="cannot have a near copy"):
            one.slots.near.add(0, torch.empty((1, words.shape[1]), dtype=torch.int32))
        assert one.slots.near.layers == frozenset()


class _Careless(NearCopies):
    """Near copies with one fault; used by the controls."""

    fault = ""

    def mend(self, layer: int, offsets: np.ndarray) -> None:
        if self.fault != "never filled":
            super().mend(layer, offsets)

    def note_changed(self, blocks: object) -> None:
        """Ignore blocks that were written in the host copy."""


class _LateToForget(OrderedLine):
    """``place`` returns before copies in flight that use the old near copy have ended."""

    def place(self, layer: int, home: torch.Tensor | None, near: torch.Tensor | None = None) -> None:
        if self.nears[layer] is None or home is None:
            super().place(layer, home, near)
        else:
            self._submit(lambda: OrderedLine.place(self, layer, home, near))


@pytest.mark.parametrize("fault", ["never filled", "unknown"])
def test_control_what_is_stale_must_be_filled(fault: str) -> None:
    with pytest.raises(AssertionError, match=r"sequence \d, token"):
        for seed in range(10):
            with world(OrderedLine(NUM_LAYERS), seed, DisturbedSlots, NearWorld) as one:
                one.slots.near.__class__ = _Careless
                one.slots.near.fault = fault  # type: ignore[attr-defined]
                live_near(one, 40)


def test_control_a_drop_must_wait_for_what_reads_the_copy() -> None:
    with pytest.raises(AssertionError, match=r"sequence \d, token"):
        for seed in range(20):
            with world(_LateToForget(NUM_LAYERS), seed, DisturbedSlots, NearWorld) as one:
                live_near(one, 40)
