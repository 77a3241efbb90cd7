"""Our side of vLLM's worker process: moves blocks between its KV caches and swap space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.plan import TransferKind
from floodplain.core.tiers import Tier
from floodplain.memory.host_transfer import HostTransferEngine
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapSpace, SwapTier
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport

_IDLE_WAIT_S = 0.05
"""For copies in a step that computes nothing, before vLLM looks for new requests again."""


class CacheBlocks:
    """vLLM's KV caches as a ``BlockStore``.

    Args:
        caches: By layer, each with its blocks in one dimension.
        num_blocks: Of vLLM's pool.
        block_tokens: Of a block.

    Raises:
        UserError: A layer's part of a block is no single piece of memory.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, block_tokens: int) -> None:
        self.words = tuple(part for name, cache in caches.items() for part in _split(name, cache, num_blocks))
        sizes = {part.shape[1] for part in self.words}
        if len(sizes) != 1:
            raise UserError("this model's layers keep blocks of several sizes: floodplain swaps those of one size")
        part_bytes = 4 * sizes.pop()
        if part_bytes % (2 * block_tokens):
            raise UserError(
                "this model's blocks are no whole number of bytes for K and V of a token: they are not swapped"
            )
        self.layout = KVLayout(
            num_layers=len(self.words), block_tokens=block_tokens, num_kv_heads=1,
            head_dim=part_bytes // (2 * block_tokens), dtype=torch.uint8,
        )  # fmt: skip
        self._num_blocks = num_blocks

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """See ``BlockStore``."""
        if not all(0 <= block < self._num_blocks for block in blocks):
            raise InvariantError("a block is copied that vLLM's pool does not have")


def _split(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """One layer's cache as [blocks, words], or as two of them where K and V lie apart."""
    if cache.shape[0] == num_blocks:
        return [_as_words(name, cache)]
    if cache.shape[0] == 2 and cache.shape[1] == num_blocks:
        return [_as_words(name, cache[0]), _as_words(name, cache[1])]
    raise UserError(f"{name} has a KV cache of shape {tuple(cache.shape)}, in which {num_blocks} blocks are not found")


def _as_words(name: str, cache: torch.Tensor) -> torch.Tensor:
    num_blocks, size = cache.shape[0], cache[0].numel()
    dense = 1
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        dense = dense * length if stride == dense or length == 1 else 0
    if dense != size or cache.stride(0) != size or (size * cache.element_size()) % 4:
        raise UserError(f"blocks in the KV cache of {name} are no pieces of memory side by side: use another backend")
    if cache.device.type != "cpu":
        raise UserError("floodplain in vLLM swaps on CPUs only so far: on a GPU use its own engine, `floodplain serve`")
    flat = torch.as_strided(cache, (num_blocks, size), (size, 1), cache.storage_offset())
    return flat.view(torch.int32)


class SwapWorker:
    """Copies as the scheduler orders.

    Args:
        blocks: vLLM's.
        num_slots: Of swap space.
    """

    def __init__(self, blocks: CacheBlocks, num_slots: int) -> None:
        slots = SwapSlots(blocks.layout, num_slots)
        slots.words.zero_()  # memory that is missing shows now, and no copy waits for its first touch
        self.slots = slots
        self._space = SwapSpace({Tier.HOST: SwapTier(slots, HostTransferEngine(blocks, slots).start())})
        self._owners: dict[int, str] = {}
        self._ended: list[tuple[int, bool]] = []
        self._is_idle = False

    def begin(self, orders: StepOrders) -> None:
        """Start all copies of a step and return at once."""
        self._owners |= orders.owners
        self._is_idle = orders.is_idle
        for transfer in sorted(orders.transfers, key=lambda one: one.kind is not TransferKind.SWAP_IN):
            self._space.start(transfer)

    def finish(self) -> tuple[set[str], set[str]]:
        """Take what has ended: requests whose copy back did, and those of them for which it was not whole."""
        ended = self._space.wait(_IDLE_WAIT_S) if self._is_idle else self._space.poll()
        self._ended += ended
        owners = {transfer_id: self._owners.pop(transfer_id) for transfer_id, _ in ended if transfer_id in self._owners}
        failed = {owners[transfer_id] for transfer_id, ok in ended if transfer_id in owners and not ok}
        return set(owners.values()), failed

    def take_report(self) -> WorkerReport:
        """What ended since the last call."""
        ended, self._ended = self._ended, []
        return WorkerReport({transfer_id: (1, ok) for transfer_id, ok in ended}, tuple(self._space.take_copy_times()))

    def close(self) -> None:
        """Let the copies in flight end. Safe to call twice."""
        self._space.close()
