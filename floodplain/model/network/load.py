"""Build a decoder, layer by layer, from a configuration and a source of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from floodplain.core.errors import InvariantError
from floodplain.model.attention.backend import AttentionBackend, AttentionShape
from floodplain.model.native.ops import NativeOps, native_ops
from floodplain.model.network import llama, opt
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder, Layer, Stem
from floodplain.model.network.linear import Linear, MakeProjection, PackedLinear, Projection
from floodplain.model.network.ops import KernelOps, LayerOps, TorchOps
from floodplain.model.network.parameters import (
    Allocate,
    ParameterSpec,
    Part,
    PlainBuffer,
    WeightSource,
    load_buffer,
)

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Family:
    stem_specs: Callable[[ModelConfig], list[ParameterSpec]]
    layer_specs: Callable[[ModelConfig, int], list[ParameterSpec]]
    make_stem: Callable[[ModelConfig, Mapping[str, torch.Tensor], LayerOps], Stem]
    make_layer: Callable[[ModelConfig, Mapping[str, torch.Tensor], MakeProjection, LayerOps], Layer]


_FAMILIES = {
    "llama": _Family(llama.stem_specs, llama.layer_specs, llama.LlamaStem, llama.LlamaLayer),
    "opt": _Family(opt.stem_specs, opt.layer_specs, opt.OptStem, opt.OptLayer),
}


def parameter_parts(config: ModelConfig, only: range | None = None) -> Iterator[Part]:
    """All parts that ``load_decoder`` reads from a checkpoint; ``only`` as there."""
    family = _FAMILIES[config.shape.family]
    yield from (part for spec in family.stem_specs(config) for part in spec.parts)
    if not config.shape.tied_embeddings:
        yield from _head_spec(config).parts
    for index in range(config.shape.num_layers) if only is None else only:
        yield from (part for spec in family.layer_specs(config, index) for part in spec.parts)


def load_decoder(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
    allocate: Allocate | None = None,
    is_packed: bool = False,
    only: range | None = None,
) -> Decoder:
    """Load a model. Raises UserError if weights are missing, unreadable or of another shape.

    Args:
        allocate: Allocates the buffer of each layer; by default torch does.
        is_packed: Repack matrices for the CPU (``linear.can_pack``): faster, but the layers have no buffers.
        only: The adjacent layers of a pipeline stage; None loads all.
    """
    if is_packed and allocate is not None:
        raise ValueError("packed parameters do not lie in allocated buffers")
    family, shape = _FAMILIES[config.shape.family], config.shape
    allocate = allocate or _torch_allocate(device)
    project: MakeProjection = PackedLinear if is_packed else Linear
    native = native_ops(device, dtype)
    ops = TorchOps() if native is None else KernelOps(native)
    _, stem_params = load_buffer(family.stem_specs(config), source, dtype, _torch_allocate(device))
    layers, buffers = {}, []
    for index in range(shape.num_layers) if only is None else only:
        buffer, params = load_buffer(family.layer_specs(config, index), source, dtype, allocate)
        if is_packed:
            params = {name: param.clone() if param.dim() == 1 else param for name, param in params.items()}
        else:
            buffers.append(buffer)
        layers[index] = family.make_layer(config, params, project, ops)
    return Decoder(
        config,
        family.make_stem(config, stem_params, ops),
        layers,
        _load_head(config, source, dtype, device, stem_params["embedding"], project),
        _open_attention(
            device, AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, block_tokens), native
        ),
        dtype=dtype,
        device=device,
        layer_buffers=buffers,
    )


def _open_attention(device: torch.device, shape: AttentionShape, native: NativeOps | None) -> AttentionBackend:
    if device.type == "cpu":
        from floodplain.model.attention.cpu import CpuAttention

        return CpuAttention(shape, native)
    if device.type == "cuda":
        from floodplain.model.attention.cuda import CudaAttention

        return CudaAttention(shape)
    raise InvariantError(f"no attention for device {device}")


def _load_head(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    embedding: torch.Tensor,
    project: MakeProjection,
) -> Projection:
    if config.shape.tied_embeddings:
        return project(embedding, None)
    _, params = load_buffer([_head_spec(config)], source, dtype, _torch_allocate(device))
    return project(params["head"], None)


def _head_spec(config: ModelConfig) -> ParameterSpec:
    return ParameterSpec("head", (Part(HEAD_NAME, (config.shape.vocab_size, config.shape.hidden_size)),))


def _torch_allocate(device: torch.device) -> Allocate:
    return lambda num_bytes: PlainBuffer(torch.empty(num_bytes, dtype=torch.uint8, device=device))
