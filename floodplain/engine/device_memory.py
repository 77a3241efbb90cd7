"""All memory of one engine on its device: an arena for each layer's parameters, loaded there, and the KV pool."""

from __future__ import annotations

import logging
import math

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.core.sizes import show_size
from floodplain.engine.config import EngineConfig
from floodplain.memory.backend import Backend
from floodplain.memory.host.named_file import sweep
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.paged_buffer import PagedBuffer
from floodplain.model.network.config import ModelConfig
from floodplain.model.network.decoder import Decoder
from floodplain.model.network.linear import can_pack, fast_dtype
from floodplain.model.network.load import load_decoder, parameter_parts
from floodplain.model.network.parameters import WeightSource
from floodplain.model.weights.open_model import ModelSource
from floodplain.observe.start_log import StartLog

logger = logging.getLogger(__name__)

_ALIGN_SLACK_PERCENT = 105
"""Memory of parameters with alignment and whole pages, in percent. An integer, since files may state any size."""


class DeviceMemory:
    """Owner of the device object and of everything mapped on it. Raises UserError if memory or the name is taken.

    ``shared_name`` is the name under which neighbours find the device; None makes a private one. ``layer_buffers`` are
    each layer's parameters, in the order in which they were allocated.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        backend: Backend,
        dtype: torch.dtype,
        shared_name: str | None = None,
    ) -> None:
        left = sweep()  # a host device's memory outlives its process
        if left:
            size = show_size(sum(left.values()))
            logger.info("removed devices that killed engines left: %s, %s", ", ".join(left), size)
        shape = model.shape
        self.layout = KVLayout(
            num_layers=shape.num_layers,
            block_tokens=config.block_tokens,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
        self.layer_buffers: list[PagedBuffer] = []
        self._config = config
        self._backend = backend
        is_packed = config.pack_weights and can_pack(dtype, backend.torch_device)
        kept = fast_dtype(dtype, backend.torch_device) if is_packed else dtype
        param_bytes = shape.param_bytes(kept.itemsize) * _ALIGN_SLACK_PERCENT // 100
        self.device, self._close_device = backend.open_device(self.layout, config.kv_memory, param_bytes, shared_name)

    def allocate_parameters(self, num_bytes: int) -> PagedBuffer:
        """Map a buffer for the next layer's parameters, which can move or be unmapped alone. Raises UserError."""
        buffer = PagedBuffer(self.device, num_bytes)
        pages = self.device.allocate(buffer.num_pages)
        if pages is None:
            shortage = self._find_shortage(num_bytes)
            raise UserError(f"the model's parameters do not fit: {shortage}choose a smaller model, or --dtype bfloat16")
        buffer.map(pages)
        self.layer_buffers.append(buffer)
        return buffer

    @property
    def quantum_blocks(self) -> int:
        """Blocks by which the KV pool grows and shrinks."""
        return self.layout.count_quantum_blocks(self.device.page_bytes)

    def count_pool_blocks(self) -> int:
        """Blocks that the KV pool is to have. Call it after the parameters are loaded."""
        num_bytes = self._config.kv_memory or self._backend.default_kv_bytes(self.device)
        return -(-num_bytes // self.layout.block_bytes)

    def open_pool(
        self, num_blocks: int, least_blocks: int, most_blocks: int | None = None
    ) -> tuple[KVPool, BlockLedger]:
        """Open the KV pool with its memory mapped, and its ledger. Raises UserError if the device has no room for it.

        Neighbours may still hold memory that was lent before: then the pool starts with free memory, at least
        ``least_blocks``. If layers may stream, it has up to ``most_blocks``; None: they never do.
        """
        pool = KVPool(self.device, self.layout, most_blocks or num_blocks)
        ledger = BlockLedger(
            0,
            self.layout.block_tokens,
            quantum_blocks=pool.quantum_blocks,
            caches_prefixes=self._config.enable_prefix_caching,
        )
        num_now = self._count_unlent_blocks(pool, num_blocks)
        if num_now < least_blocks or pool.grow(ledger, num_now) is None:
            num_bytes = num_blocks * self.layout.block_bytes
            raise UserError(
                f"a KV pool of {show_size(num_bytes)} does not fit: {self._find_shortage(num_bytes)}lower --kv-memory"
            )
        if num_now < num_blocks:
            logger.warning("the KV pool begins with %d of %d blocks: neighbours hold the rest", num_now, num_blocks)
        return pool, ledger

    def _count_unlent_blocks(self, pool: KVPool, num_blocks: int) -> int:
        """Blocks of the pool without the pages that neighbours hold; unused room for parameters does not count."""
        num_foreign = self.device.num_foreign_pages()
        if not num_foreign:
            return num_blocks
        num_pages = max(0, pool.count_pages(num_blocks) - num_foreign)
        return num_pages * self.device.page_bytes // pool.quantum_bytes * pool.quantum_blocks

    def _find_shortage(self, num_bytes: int) -> str:
        """Text for the middle of an error message: which memory is too small for ``num_bytes``."""
        backing = self.device.backing()
        if backing is not None and backing[1] < num_bytes:
            folder, free = backing
            return f"{folder} has {show_size(free)} free: enlarge it (docker run --shm-size), or "
        free = self.device.num_free_pages() * self.device.page_bytes
        return f"{show_size(free)} are free on the device; "

    def close(self) -> None:
        """Free everything. Tensors over it must not be used any more. Safe to call twice."""
        self._close_device()


class CountedWeights:
    """A source of weights that logs how many of ``total_bytes`` were read, as they are in memory."""

    def __init__(self, source: WeightSource, total_bytes: int, start_log: StartLog) -> None:
        self._source, self._total_bytes, self._start_log = source, total_bytes, start_log
        self._num_bytes = 0
        start_log.begin(f"reading {show_size(total_bytes)} of weights")

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Write the weights called ``name`` into ``target``."""
        self._source.fill(target, name)
        self._num_bytes += target.nbytes
        self._start_log.note_bytes(self._num_bytes, self._total_bytes)


def torch_dtype(name: str) -> torch.dtype:
    """The number format that ``--dtype`` names."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[name]


def load_model(
    config: EngineConfig,
    source: ModelSource,
    memory: DeviceMemory,
    device: torch.device,
    dtype: torch.dtype,
    only: range | None = None,
    start_log: StartLog | None = None,
) -> Decoder:
    """Load a model's layers (``only`` those of a stage) into an engine's memory, or packed for a CPU beside it."""
    is_packed = config.pack_weights and can_pack(dtype, device)
    total_bytes = sum(math.prod(part.shape) for part in parameter_parts(source.config, only)) * dtype.itemsize
    return load_decoder(
        source.config,
        CountedWeights(source, total_bytes, start_log or StartLog()),
        dtype=dtype,
        device=device,
        block_tokens=config.block_tokens,
        allocate=None if is_packed else memory.allocate_parameters,
        is_packed=is_packed,
        only=only,
    )
