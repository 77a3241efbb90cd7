from __future__ import annotations

from typing import Any

import pytest
import torch

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import shape_named
from floodplain.model.network import llama, opt
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.load import load_decoder
from floodplain.model.network.parameters import (
    ALIGN_BYTES,
    ParameterSpec,
    Part,
    PlainBuffer,
    buffer_bytes,
    fill_buffer,
    load_buffer,
    view_buffer,
)
from floodplain.model.weights.open_model import DummyModel
from tests.support.decoding import all_logits

CPU = torch.device("cpu")


class _Allocator:
    def __init__(self) -> None:
        self.buffers: list[PlainBuffer] = []

    def __call__(self, num_bytes: int) -> PlainBuffer:
        self.buffers.append(PlainBuffer(torch.empty(num_bytes, dtype=torch.uint8)))
        return self.buffers[-1]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-opt", "smollm2-135m", "opt-13b"])
def test_a_layer_has_as_many_parameters_as_its_shape_states(name: str) -> None:
    config = ModelConfig.of_shape(shape_named(name))
    family = opt if config.shape.family == "opt" else llama
    layer = sum(torch.Size(spec.shape).numel() for spec in family.layer_specs(config, 0))
    stem = sum(torch.Size(spec.shape).numel() for spec in family.stem_specs(config))
    assert layer == config.shape.layer_params
    assert stem == config.shape.embedding_params - (0 if config.shape.tied_embeddings else _head_params(config))


def _head_params(config: ModelConfig) -> int:
    return config.shape.vocab_size * config.shape.hidden_size


def test_every_parameter_is_an_aligned_view_of_one_buffer() -> None:
    model = DummyModel("tiny-qwen")
    specs = llama.layer_specs(model.config, 1)
    allocate = _Allocator()
    buffer, views = load_buffer(specs, model, torch.bfloat16, allocate)
    assert [buffer] == allocate.buffers
    assert buffer.tensor.numel() == buffer_bytes(specs, torch.bfloat16)
    begins = sorted(view.data_ptr() - buffer.tensor.data_ptr() for view in views.values())
    assert begins[0] == 0
    assert all(begin % ALIGN_BYTES == 0 for begin in begins)
    moved = view_buffer(buffer.tensor.clone(), specs, torch.bfloat16)
    assert all(torch.equal(moved[name], view) for name, view in views.items())


def load_dummy(name: str, **options: Any) -> Decoder:
    source = DummyModel(name)
    return load_decoder(source.config, source, dtype=torch.float32, device=CPU, block_tokens=4, **options)


class _Ones:
    """A source of weights that are all one."""

    def fill(self, target: torch.Tensor, name: str) -> None:
        target.fill_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, dtype: torch.dtype) -> None:
    class Damaged(DummyModel):
        def fill(self, target: torch.Tensor, name: str) -> None:
            super().fill(target, name)
            if name == "model.layers.1.mlp.down_proj.weight":
                target[-1, 3] = value

    source = Damaged("tiny-llama")
    with pytest.raises(UserError, match=r"the weights 'model.layers.1.mlp.down_proj.weight' have NaN or infinite"):
        load_decoder(source.config, source, dtype=dtype, device=CPU, block_tokens=4)


def test_equal_parameters_are_equal_bytes_in_any_memory() -> None:
    specs = [ParameterSpec(str(size), (Part(str(size), (size,)),)) for size in (5, 16, 33)]
    size = buffer_bytes(specs, torch.float32)
    buffers = [PlainBuffer(torch.full((size,), byte, dtype=torch.uint8)) for byte in (0, 255)]
    for buffer in buffers:
        fill_buffer(buffer, specs, _Ones(), torch.float32)
    assert torch.equal(buffers[0].tensor, buffers[1].tensor)
    assert buffers[0].tensor.count_nonzero() == (5 + 16 + 33) * 2  # a one is 00 00 80 3f


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-opt"])
def test_dummies_are_sane_seeded_and_the_same_in_any_batch(name: str) -> None:
    model = load_dummy(name)
    logits = all_logits(model, range(40))
    assert 0.5 < float(logits.std()) < 8
    torch.testing.assert_close(all_logits(model, range(40), 7), logits, rtol=0, atol=1e-4)
    assert torch.equal(all_logits(load_dummy(name), range(40)), logits)
