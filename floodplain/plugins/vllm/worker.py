"""Our side of vLLM's worker process: moves blocks between its KV caches and swap space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from weakref import WeakValueDictionary

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.core.plan import TransferKind
from floodplain.core.tiers import Tier
from floodplain.engine.peer_parts import PeerParts, make_peer_slots, open_cuda_parts, open_host_parts
from floodplain.engine.swap import LINK_STAGING_BYTES, open_host_tier
from floodplain.memory.kv_layout import KVLayout
from floodplain.memory.swap_slots import SwapSlots
from floodplain.memory.swap_space import SwapSpace, SwapTier
from floodplain.plugins.vllm.messages import StepOrders, WorkerReport
from floodplain.plugins.vllm.tally import Tally

_GPU_PIECE_BYTES = 16
"""A lane of our kernels moves so many at a time (``memory.triton_copy``)."""
_IDLE_WAIT_S = 0.05
"""For copies in a step that computes nothing, before vLLM looks for new requests again."""


class CacheBlocks:
    """vLLM's KV caches as a ``BlockStore``.

    Args:
        caches: By layer, each with its blocks in one dimension.
        num_blocks: Of vLLM's pool.
        block_tokens: Of a block.

    Attributes:
        device: Where they lie.

    Raises:
        UserError: A layer's part of a block is no single piece of memory, or they lie where nothing of ours copies.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, block_tokens: int) -> None:
        self.device = _find_device(caches)
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
        if self.device.type == "cuda" and (part_bytes % _GPU_PIECE_BYTES or any(_is_skewed(w) for w in self.words)):
            raise UserError("this model's blocks do not begin at whole 16 bytes, which copies on a GPU need")
        self._num_blocks = num_blocks

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """See ``BlockStore``."""
        if not all(0 <= block < self._num_blocks for block in blocks):
            raise InvariantError("a block is copied that vLLM's pool does not have")


def _find_device(caches: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {cache.device for cache in caches.values()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, devices)))
        raise UserError(
            f"floodplain in vLLM swaps from one CPU or NVIDIA GPU per worker, not from {found or 'nothing'}"
        )
    return devices.pop()


def _is_skewed(words: torch.Tensor) -> bool:
    return words.data_ptr() % _GPU_PIECE_BYTES != 0


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
    is_whole_words = not (size * cache.element_size() % 4 or cache.storage_offset() * cache.element_size() % 4)
    if dense != size or cache.stride(0) != size or not is_whole_words:
        raise UserError(f"blocks in the KV cache of {name} are no pieces of memory side by side: use another backend")
    flat = torch.as_strided(cache, (num_blocks, size), (size, 1), cache.storage_offset())
    return flat.view(torch.int32)


class SwapWorker:
    """Copies as the scheduler orders.

    Args:
        blocks: vLLM's.
        num_slots: Of swap space in host memory.
        peer_bytes: Of swap space on neighbours, at most; 0 has none.

    Attributes:
        peer: Without memory, until somebody in this process borrows some for it.
        before_close: Called before swap space is given back.
    """

    def __init__(self, blocks: CacheBlocks, num_slots: int, peer_bytes: int = 0) -> None:
        self.slots, host = open_host_tier(blocks, blocks.device, num_slots)
        self.peer: PeerParts | None = None
        self.before_close: Callable[[], None] = lambda: None
        tiers = {Tier.HOST: host}
        if peer_bytes:
            near, self.peer = _open_peer_tier(blocks, self.slots, peer_bytes)
            tiers = {Tier.PEER: near, **tiers}
        self._space = SwapSpace(tiers)
        self.tally = Tally()
        self._counted = self._space.stats()
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
        if ended:
            self._count()
        return set(owners.values()), failed

    def _count(self) -> None:
        """What has moved, and what was not whole, since the last time."""
        before, self._counted = self._counted, self._space.stats()
        for (direction, tier), num_bytes in self._counted.traffic_bytes.items():
            moved = num_bytes - before.traffic_bytes.get((direction, tier), 0)
            self.tally.count("swap_bytes_total", direction, tier, by=moved)
        for problem, number in self._counted.failed_copies.items():
            self.tally.count("failed_transfers_total", problem.value, by=number - before.failed_copies[problem])

    def take_report(self) -> WorkerReport:
        """What ended since the last call."""
        ended, self._ended = self._ended, []
        return WorkerReport({transfer_id: (1, ok) for transfer_id, ok in ended}, tuple(self._space.take_copy_times()))

    def close(self) -> None:
        """Let the copies in flight end. Safe to call twice."""
        self.before_close()
        if self.peer is not None:
            self.peer.mover.close()
        self._space.close()


_HERE: WeakValueDictionary[str, SwapWorker] = WeakValueDictionary()
"""Workers of this process, by vLLM's name of the engine."""


def introduce(engine_id: str, worker: SwapWorker) -> None:
    """It can be found by its engine's name, if the scheduler is in this process, too."""
    _HERE[engine_id] = worker


def find_worker(engine_id: str) -> SwapWorker | None:
    """None if it is in another process."""
    return _HERE.get(engine_id)


def _open_peer_tier(blocks: CacheBlocks, host: SwapSlots, num_bytes: int) -> tuple[SwapTier, PeerParts]:
    slots = make_peer_slots(blocks.layout, num_bytes)
    if blocks.device.type == "cuda":
        staging_blocks = max(1, LINK_STAGING_BYTES // blocks.layout.block_bytes)
        return open_cuda_parts(blocks, blocks.device, host, slots, staging_blocks)
    return open_host_parts(blocks, host, slots, None, None)
