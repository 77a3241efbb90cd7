"""A decoder in two stages, layers [0, k) and [k, n), equals the whole bit for bit: activations, logits and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cost.model_shape import shape_named
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.load import load_decoder
from floodplain.model.weights.open_model import DummyModel
from tests.support.decoding import Sequences
from tests.support.examples import examples

NUM_LAYERS, NUM_SEQUENCES, MAX_TOKENS = 5, 3, 24
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Step:
    """(sequence, token) decodes, and (sequence, tokens) chunks."""

    decodes: list[tuple[int, int]]
    chunks: list[tuple[int, list[int]]]


@cache
def load(name: str, dtype: torch.dtype, seed: int) -> Decoder:
    config = ModelConfig.of_shape(replace(shape_named(name), num_layers=NUM_LAYERS))
    source = DummyModel(name, seed)
    return load_decoder(config, source, dtype=dtype, device=torch.device("cpu"), block_tokens=4)


@st.composite
def stories(draw: st.DrawFn) -> list[Step]:
    """Draw steps that compute a chunk or a decode of some sequences; a sequence begins with a chunk."""
    lengths, steps = [0] * NUM_SEQUENCES, []
    tokens = st.integers(0, 255)
    for _ in range(draw(st.integers(1, 4))):
        step = Step([], [])
        for index in sorted(draw(st.sets(st.integers(0, NUM_SEQUENCES - 1), min_size=1))):
            room = MAX_TOKENS - lengths[index]
            if lengths[index] and room and draw(st.booleans()):
                step.decodes.append((index, draw(tokens)))
                lengths[index] += 1
            elif room:
                step.chunks.append((index, draw(st.lists(tokens, min_size=1, max_size=min(9, room)))))
                lengths[index] += len(step.chunks[-1][1])
        if step.decodes or step.chunks:
            steps.append(step)
    return steps


def run_staged(model: Decoder, sequences: Sequences, step: Step, stages: Sequence[range]) -> torch.Tensor:
    """Run one step by stages; each stage has only the KV of its own layers."""
    batch = sequences.next_batch(step.decodes, step.chunks)
    x = model.embed(batch)
    for layers in stages:
        nothing = torch.empty(0, dtype=model.dtype)
        own = [kv if index in layers else nothing for index, kv in enumerate(sequences.kv_layers)]
        x = model.run_layers(layers, batch, x.clone(), own)
    return model.finish(batch, x)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits: unwritten slots are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-opt"])
@settings(max_examples=examples(12))
@given(st.sampled_from(DTYPES), st.integers(0, 3), stories(), st.integers(0, NUM_LAYERS))
def test_two_stages_are_the_whole(name: str, dtype: torch.dtype, seed: int, story: list[Step], cut: int) -> None:
    model = load(name, dtype, seed)
    whole, staged = (Sequences(model, NUM_SEQUENCES, MAX_TOKENS) for _ in range(2))
    for step in story:
        expected = whole.run(step.decodes, step.chunks)
        found = run_staged(model, staged, step, [range(cut), range(cut, NUM_LAYERS)])
        assert same_bits(found, expected)
    assert all(same_bits(one, other) for one, other in zip(staged.kv_layers, whole.kv_layers, strict=True))


@pytest.mark.parametrize("stages", [[range(4)], [range(2), range(3, 5)], [range(2, 5), range(2)]])
def test_a_layer_left_out_or_out_of_order_shows(stages: list[range]) -> None:
    model = load("tiny-llama", torch.float32, 0)
    step = Step([], [(0, [1, 2, 3, 4, 5])])
    whole, staged = (Sequences(model, NUM_SEQUENCES, MAX_TOKENS) for _ in range(2))
    assert not same_bits(run_staged(model, staged, step, stages), whole.run(step.decodes, step.chunks))


def test_hooks_are_called_around_the_layers_of_the_stage() -> None:
    model = load("tiny-opt", torch.float32, 0)
    sequences = Sequences(model, 1, MAX_TOKENS)
    calls: list[tuple[str, int]] = []

    class Hooks:
        def before_layer(self, index: int) -> None:
            calls.append(("before", index))

        def after_layer(self, index: int) -> None:
            calls.append(("after", index))

    batch = sequences.next_batch([], [(0, [1, 2])])
    model.run_layers(range(1, 3), batch, model.embed(batch), sequences.kv_layers, Hooks())
    assert calls == [(when, index) for index in (1, 2) for when in ("before", "after")]
