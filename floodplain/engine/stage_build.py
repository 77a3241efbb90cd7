"""Builds one stage of a pipeline: some layers of a model, and a KV pool for these in the memory of all layers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.sizes import show_size
from floodplain.cost.model_shape import ModelShape
from floodplain.cost.pipeline import StageMemory, head_layers, split_layers
from floodplain.engine.compute_threads import limit_compute_threads
from floodplain.engine.config import EngineConfig
from floodplain.engine.device_memory import DeviceMemory, load_model, torch_dtype
from floodplain.engine.pool_limits import find_limits
from floodplain.engine.runner import StageRunner
from floodplain.memory.backend_choice import choose_backend
from floodplain.memory.kv_layout import KVLayout, LayerTensors
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.layer_slots import LayerSlots
from floodplain.model.network.decoder import Decoder
from floodplain.model.sampler import Sampler
from floodplain.model.structure import Grammars, grammars_of
from floodplain.model.tokenizer import Tokenizer, reachable
from floodplain.model.weights.open_model import ModelSource, fingerprint_kv, open_model
from floodplain.observe.start_log import StartLog
from floodplain.runtime.state import LoopConfig

logger = logging.getLogger(__name__)

_SOME_BYTES = 2**30
"""Assumed bytes of KV without ``--kv-memory``: stages have the same, so the cut does not depend on it."""


def cut_model(config: EngineConfig, shape: ModelShape, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, equal in every process. Raises UserError if the model has fewer layers than stages."""
    if shape.num_layers < num_stages:
        raise UserError(
            f"{config.model} has {shape.num_layers} layers, too few for a pipeline of {num_stages} stages: "
            f"lower --instances to {shape.num_layers} at most"
        )
    dtype_bytes = torch_dtype(config.dtype).itemsize
    layer_bytes = shape.layer_bytes(dtype_bytes)
    memory = StageMemory(
        num_bytes=(config.kv_memory or _SOME_BYTES) + shape.num_layers * layer_bytes,
        layer_bytes=layer_bytes,
        block_bytes=2 * shape.kv_size * dtype_bytes * config.block_tokens,
    )
    return split_layers(shape.num_layers, [memory] * num_stages, head_layers(shape))


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parts of a process that computes a stage of a pipeline, except for the KV.

    ``model`` has the stage's layers, embedding and head; shape, fingerprint and ``block_bytes`` are the whole model's.
    """

    config: EngineConfig
    shape: ModelShape
    model: Decoder
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    fingerprint: str
    block_bytes: int

    @property
    def layers(self) -> range:
        """The layers that it computes."""
        return self.model.held

    @property
    def grammars(self) -> Grammars:
        """The grammars of structured requests."""
        return grammars_of(self.tokenizer, self.shape.vocab_size)

    def loop_config(self, max_model_len: int, depth: int = 1) -> LoopConfig:
        """The limits of a loop with up to ``depth`` outstanding steps, for requests of at most ``max_model_len``."""
        return LoopConfig(
            max_model_len=max_model_len,
            max_batched_tokens=self.config.max_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            max_waiting=self.config.max_waiting,
            depth=depth,
            eos_token_ids=self.eos_token_ids,
            fingerprint=self.fingerprint,
            block_bytes=self.block_bytes,
            pins_sessions=self.config.pin_sessions,
        )

    def make_runner(
        self, kv_layers: Sequence[torch.Tensor], max_model_len: int, layer_slots: LayerSlots | None = None
    ) -> StageRunner:
        """Make a runner without sequences; arguments as of ``StageRunner``, ``max_model_len`` of the pipeline."""
        return StageRunner(
            self.model,
            kv_layers,
            Sampler(self.eos_token_ids, self.config.seed),
            block_tokens=self.config.block_tokens,
            max_model_len=max_model_len,
            grammars=self.grammars,
            layer_slots=layer_slots,
        )


def make_parts(
    config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, model: Decoder, layout: KVLayout
) -> StageParts:
    """The parts of a process whose ``model`` has some layers of ``source`` or all; ``config`` is resolved."""
    shape = source.config.shape
    return StageParts(
        config=config,
        shape=shape,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=reachable(tokenizer.eos_token_ids, shape.vocab_size),
        fingerprint=fingerprint_kv(source, config.device, config.dtype, config.block_tokens),
        block_bytes=layout.layer_block_bytes * shape.num_layers,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One process's stage of a pipeline; it outlives re-formed pipelines. ``close`` it.

    ``max_model_len`` is the most tokens of a request, if the other stages have as many blocks.
    """

    parts: StageParts
    pool: KVPool
    memory: DeviceMemory
    max_model_len: int

    @property
    def config(self) -> EngineConfig:
        """The engine flags, resolved."""
        return self.parts.config

    @property
    def num_blocks(self) -> int:
        """Blocks of its pool."""
        return self.pool.num_blocks

    def make_runner(self, max_model_len: int) -> StageRunner:
        """Make a runner over the pool without sequences, for the ``max_model_len`` of the pipeline."""
        held = self.parts.layers

        def tensor_of(layer: int) -> torch.Tensor:
            if layer not in held:
                raise InvariantError(f"layer {layer} is another stage's")
            return self.pool.layers[layer - held.start]

        return self.parts.make_runner(LayerTensors(held.stop, tensor_of), max_model_len)

    def make_ledger(self, num_blocks: int) -> BlockLedger:
        """Make the pipeline's ledger of ``num_blocks`` free blocks; each stage has its layers' part of them."""
        return BlockLedger(num_blocks, self.config.block_tokens, caches_prefixes=self.config.enable_prefix_caching)

    def close(self) -> None:
        """Free all memory; no runner may run any more."""
        self.memory.close()


def build_stage(config: EngineConfig, stage: int, num_stages: int) -> Stage:
    """Load stage number ``stage`` of a model, and map its KV pool. UserError if it is unreadable, or too small."""
    start_log = StartLog()
    limit_compute_threads()
    start_log.begin(f"opening the model {config.model}")
    backend, dtype = choose_backend(torch.device(config.device)), torch_dtype(config.dtype)
    source = open_model(config.model, config.seed)
    shape = source.config.shape
    layers = cut_model(config, shape, num_stages)[stage]
    own_config = replace(source.config, shape=replace(shape, num_layers=len(layers)))
    if config.kv_memory is not None:
        spare_bytes = (shape.num_layers - len(layers)) * shape.layer_bytes(dtype.itemsize)
        config = replace(config, kv_memory=config.kv_memory + spare_bytes)
    with ExitStack() as on_failure:
        memory = DeviceMemory(config, own_config, backend, dtype)
        on_failure.callback(memory.close)
        model = load_model(config, source, memory, backend.torch_device, dtype, only=layers, start_log=start_log)
        num_blocks = memory.count_pool_blocks()
        limits = find_limits(config, source.config, num_blocks, memory.layout.block_bytes)
        pool, _ = memory.open_pool(num_blocks, num_blocks)
        config = replace(config, max_model_len=limits.max_model_len, kv_memory=pool.num_blocks * pool.block_bytes)
        parts = make_parts(config, source, source.load_tokenizer(), model, memory.layout)
        on_failure.pop_all()
    logger.info("engine config %s", json.dumps(asdict(config)))
    size = show_size(pool.num_blocks * pool.block_bytes)
    logger.info("stage %d has layers %d to %d, and %s of KV", stage, layers.start, layers.stop - 1, size)
    return Stage(parts, pool, memory, limits.max_model_len)
