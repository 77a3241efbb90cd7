"""vLLM's KV caches as blocks that can be copied, whatever layout vLLM has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.kv_layout import KVLayout


class CacheBlocks:
    """vLLM's KV caches as a ``BlockStore``.

    Args:
        caches: By layer, each with its blocks in one dimension.
        num_blocks: Of vLLM's pool.
        block_tokens: Of a block.

    Attributes:
        device: Of the caches.
        words: The pieces of memory of a block, int32 [blocks, words]: one of each layer, or one of all layers if vLLM
            keeps a block's layers side by side (its layouts that begin with B).

    Raises:
        UserError: A layer's part of a block is not one piece of memory, or its device is one from which none is copied.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, block_tokens: int) -> None:
        self.device = _find_device(caches)
        self.words = _find_pieces(caches, num_blocks)
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

    def expect_pieces(self, num_bytes: int) -> None:
        """Check that parts of blocks begin at, and have, a whole multiple of ``num_bytes``.

        Raises:
            UserError: A part does not.
        """
        if any(words.data_ptr() % num_bytes or 4 * words.shape[1] % num_bytes for words in self.words):
            raise UserError(f"this model's blocks do not begin at whole {num_bytes} bytes, which copies on a GPU need")

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Check that vLLM's pool has all of these blocks; else raise ``InvariantError``."""
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


def _find_pieces(caches: Mapping[str, torch.Tensor], num_blocks: int) -> tuple[torch.Tensor, ...]:
    views: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
    for name, cache in caches.items():
        for part in _split(name, cache, num_blocks):
            place = (part.untyped_storage().data_ptr(), part.storage_offset(), part.shape, part.stride())
            views.setdefault(place, (name, part))  # layers that share their KV are one
    whole = _as_one_piece([part for _, part in views.values()])
    return (whole,) if whole is not None else tuple(_as_words(name, part) for name, part in views.values())


def _split(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Return one layer's cache with its blocks as first dimension; two tensors if K and V lie apart."""
    if cache.shape[0] == num_blocks:
        return [cache]
    if cache.shape[0] == 2 and cache.shape[1] == num_blocks:
        return [cache[0], cache[1]]
    if cache.shape[0] and cache.shape[0] % num_blocks == 0:  # vLLM splits blocks for kernels that want smaller ones
        return [cache.view(num_blocks, -1, *cache.shape[1:])]
    raise UserError(f"{name} has a KV cache of shape {tuple(cache.shape)}, in which {num_blocks} blocks are not found")


def _as_one_piece(views: list[torch.Tensor]) -> torch.Tensor | None:
    """Return blocks of all layers as words, with padding; None if the parts of a block are not in one piece."""
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
    strides = {view.stride(0) * view.element_size() for view in views}
    if len(views) < 2 or len(storages) != 1 or len(strides) != 1:
        return None
    (storage,), (stride,) = storages.values(), strides
    first, end = min(map(_first_byte, views)), max(map(_end_byte, views))
    num_bytes = sum(view[0].numel() * view.element_size() for view in views)
    is_inside = first + len(views[0]) * stride <= storage.nbytes()
    if end - first != num_bytes or num_bytes > stride or stride % 4 or first % 4 or not is_inside:
        return None
    words = torch.empty(0, dtype=torch.int32, device=views[0].device)
    return words.set_(storage, first // 4, (len(views[0]), stride // 4), (stride // 4, 1))


def _first_byte(view: torch.Tensor) -> int:
    return int(view.storage_offset()) * view.element_size()


def _end_byte(view: torch.Tensor) -> int:
    """Return the offset behind the last byte of the first block."""
    steps = sum(stride * (length - 1) for stride, length in zip(view.stride()[1:], view.shape[1:], strict=True))
    return _first_byte(view) + (steps + 1) * view.element_size()


def _as_words(name: str, cache: torch.Tensor) -> torch.Tensor:
    num_blocks, size = cache.shape[0], cache[0].numel()
    dense = 1
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        dense = dense * length if stride == dense or length == 1 else 0
    is_whole_words = not (size * cache.element_size() % 4 or cache.storage_offset() * cache.element_size() % 4)
    if dense != size or cache.stride(0) != size or not is_whole_words:
        raise UserError(
            f"the KV cache of {name} has the unsupported strides {cache.stride()} for {tuple(cache.shape)}: a block"
            " must be one piece of memory, as in the layouts LBNHC and BLNHC (VLLM_KV_CACHE_LAYOUT)"
        )
    flat = torch.as_strided(cache, (num_blocks, size), (size, 1), cache.storage_offset())
    return flat.view(torch.int32)
