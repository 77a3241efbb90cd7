"""A layer's parameters are unmapped and loaded into other pages: the model computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.cost.model_shape import shape_named
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory
from floodplain.memory.arena import Page
from floodplain.memory.host.backend import HostBackend
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.model.network import llama, opt
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.load import load_decoder
from floodplain.model.network.parameters import WeightSource, fill_buffer
from floodplain.model.weights.open_model import DummyModel
from tests.support.decoding import BLOCK_TOKENS, Sequences, all_logits

CPU = torch.device("cpu")
DROPPED, NUM_LAYERS = 3, 5


def fill_layer(model: Decoder, index: int, source: WeightSource) -> None:
    """Load one layer's parameters again into its buffer's present memory."""
    family = opt if model.config.shape.family == "opt" else llama
    fill_buffer(model.layer_buffers[index], family.layer_specs(model.config, index), source, model.dtype)


class Loaded:
    """A tiny model with its layers in pages, and its logits."""

    def __init__(self, name: str) -> None:
        self.source = DummyModel(name)
        config = ModelConfig.of_shape(replace(shape_named(name), num_layers=NUM_LAYERS))
        self.memory = DeviceMemory(EngineConfig(model="m", kv_memory=2**24), config, HostBackend(), torch.float32)
        self.model = load_decoder(
            config,
            self.source,
            dtype=torch.float32,
            device=CPU,
            block_tokens=BLOCK_TOKENS,
            allocate=self.memory.allocate_parameters,
        )
        self.expected = self.logits()

    @property
    def dropped(self) -> PagedBuffer:
        return self.memory.layer_buffers[DROPPED]

    def logits(self) -> torch.Tensor:
        return all_logits(self.model, range(11), 7)

    def use_elsewhere(self, pages: list[Page]) -> None:
        """Map the pages in another arena and overwrite them."""
        arena = self.memory.device.reserve(len(pages))
        arena.map(0, pages)
        arena.tensor(torch.uint8, (len(pages) * arena.page_bytes,)).fill_(255)

    def other_pages(self) -> list[Page]:
        pages = self.memory.device.allocate(self.dropped.num_pages)
        assert pages is not None
        return pages


@pytest.fixture(params=["tiny-llama", "tiny-opt"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    loaded = Loaded(request.param)
    yield loaded
    loaded.memory.close()


def test_a_layer_returns_to_other_pages_and_computes_the_same(loaded: Loaded) -> None:
    owned = loaded.memory.device.num_owned_pages
    for _ in range(2):
        pages = loaded.dropped.unmap()
        loaded.use_elsewhere(pages)
        others = loaded.other_pages()
        assert not {*pages} & {*others}
        loaded.dropped.map(others)
        fill_layer(loaded.model, DROPPED, loaded.source)
        assert torch.equal(loaded.logits(), loaded.expected)
    assert loaded.memory.device.num_owned_pages == owned + 2 * loaded.dropped.num_pages


def test_a_layer_without_its_parameters_is_never_touched(loaded: Loaded) -> None:
    pages = loaded.dropped.unmap()
    with pytest.raises(InvariantError, match=r"layer 3 .* not there"):
        loaded.logits()
    with pytest.raises(InvariantError, match="buffer without memory"):
        fill_layer(loaded.model, DROPPED, loaded.source)
    loaded.dropped.map(pages)
    with pytest.raises(InvariantError, match=r"layer 3 .* not there"):  # mapped is not filled
        loaded.logits()


def test_other_layers_still_run(loaded: Loaded) -> None:
    sequences = Sequences(loaded.model, 1, 8)
    batch = sequences.next_batch([], [(0, range(8))])
    whole = loaded.model.run_layers(range(DROPPED), batch, loaded.model.embed(batch), sequences.kv_layers)
    loaded.dropped.unmap()
    found = loaded.model.run_layers(range(DROPPED), batch, loaded.model.embed(batch), sequences.kv_layers)
    assert torch.equal(found, whole)


def test_pages_that_are_not_filled_would_show(loaded: Loaded) -> None:
    loaded.use_elsewhere(loaded.dropped.unmap())
    loaded.dropped.map(loaded.other_pages())
    loaded.dropped.is_filled = True
    assert not torch.equal(loaded.logits(), loaded.expected)


class _Broken(DummyModel):
    """A source that fails within a layer."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        if name.endswith(("down_proj.weight", "fc2.weight")):
            raise UserError("unreadable")
        super().fill(target, name)


def test_a_layer_that_was_filled_in_part_is_not_there(loaded: Loaded) -> None:
    with pytest.raises(UserError, match="unreadable"):
        fill_layer(loaded.model, DROPPED, _Broken(loaded.source.name.removeprefix("dummy:")))
    with pytest.raises(InvariantError, match=r"layer 3 .* not there"):
        loaded.logits()


class _Returns:
    """Hooks that load the layer just before it runs."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def before_layer(self, index: int) -> None:
        if index == DROPPED:
            self._loaded.dropped.map(self._loaded.other_pages())
            fill_layer(self._loaded.model, index, self._loaded.source)

    def after_layer(self, index: int) -> None:
        """Keep it."""


def test_a_hook_may_bring_a_layer_just_before_it_runs(loaded: Loaded) -> None:
    loaded.memory.device.release(loaded.dropped.unmap())
    sequences = Sequences(loaded.model, 1, 7)
    sequences.hooks = _Returns(loaded)
    assert torch.equal(sequences.run([], [(0, range(7))]), loaded.expected[:7])


def test_pages_come_and_go_whole(loaded: Loaded) -> None:
    pages = loaded.dropped.unmap()
    with pytest.raises(InvariantError, match="without pages"):
        loaded.dropped.unmap()
    with pytest.raises(InvariantError, match="0 pages for a buffer that wants"):
        loaded.dropped.map([])
    loaded.dropped.map(pages)
    with pytest.raises(InvariantError, match="wants 0"):
        loaded.dropped.map(loaded.other_pages())
