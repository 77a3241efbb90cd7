"""vLLM's KV caches as blocks that can be copied, whatever layout vLLM has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from floodplain.core.errors import InvariantError, UserError
from floodplain.memory.kv_layout import KVLayout


class CacheBlocks:
    """vLLM's KV caches as a ``BlockStore``.

    UserError if a layer's part of a block is not one piece of memory, or its device is one from which none is copied.

    ``caches``: by layer, each with its blocks in one dimension; several for a layer that keeps several states.

    ``words``: the pieces of memory of a block, int32 [blocks, words]: one of each layer, or one of all layers if vLLM
    keeps a block's layers side by side (its layouts that begin with B).
    """

    def __init__(self, caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], num_blocks: int) -> None:
        parts = {name: cache if isinstance(cache, Sequence) else [cache] for name, cache in caches.items()}
        self.device = _find_device(part for layer in parts.values() for part in layer)
        self.words = _find_pieces(parts, num_blocks)
        sizes = {part.shape[1] for part in self.words}
        if len(sizes) != 1:
            raise UserError("this model's layers keep blocks of several sizes: floodplain swaps those of one size")
        # Groups of layers may differ in the tokens of a block. Copies need only its bytes: half of a word counts as K.
        self.layout = KVLayout(
            num_layers=len(self.words), block_tokens=1, num_kv_heads=1, head_dim=2 * sizes.pop(), dtype=torch.uint8
        )
        self._num_blocks = num_blocks

    def expect_pieces(self, num_bytes: int) -> None:
        """Raise UserError unless parts of blocks begin at, and have, a whole multiple of ``num_bytes``."""
        if any(words.data_ptr() % num_bytes or 4 * words.shape[1] % num_bytes for words in self.words):
            raise UserError(f"this model's blocks do not begin at whole {num_bytes} bytes, which copies on a GPU need")

    def expect_backed(self, blocks: Iterable[int]) -> None:
        """Check that vLLM's pool has all of these blocks; else raise ``InvariantError``."""
        if not all(0 <= block < self._num_blocks for block in blocks):
            raise InvariantError("a block is copied that vLLM's pool does not have")


def _find_device(parts: Iterable[torch.Tensor]) -> torch.device:
    devices = {part.device for part in parts}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, devices)))
        raise UserError(
            f"floodplain in vLLM swaps from one CPU or NVIDIA GPU per worker, not from {found or 'nothing'}"
        )
    return devices.pop()


def _find_pieces(parts: Mapping[str, Sequence[torch.Tensor]], num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Return the pieces of a block as words, each with the padding behind it.

    Layers are in one piece if their parts are side by side in each block, or if they share the memory of blocks: a
    block serves one group of layers at a time.
    """
    views = [(name, view) for name, layer in parts.items() for part in layer for view in _split(name, part, num_blocks)]
    by_place: dict[tuple[int, int], list[_Piece]] = {}
    for number, (name, view) in sorted(enumerate(views), key=lambda one: _first_byte(one[1][1])):
        pieces, stride = by_place.setdefault(_place_of(view), []), _place_of(view)[1]
        if not pieces or _first_byte(view) >= _first_byte(pieces[-1].views[0]) + stride:
            pieces.append(_Piece(number, name, []))
        pieces[-1].views.append(view)
    found = [piece for pieces in by_place.values() for piece in pieces]
    return tuple(_as_words(piece.name, piece.views) for piece in sorted(found, key=lambda piece: piece.number))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Parts of layers that are in one piece of memory in each block, and number and name of the first one."""

    number: int
    name: str
    views: list[torch.Tensor]


def _as_words(name: str, views: list[torch.Tensor]) -> torch.Tensor:
    first, end, stride = _first_byte(views[0]), max(map(_end_byte, views)), _place_of(views[0])[1]
    storage, num_blocks = views[0].untyped_storage(), views[0].shape[0]
    is_inside = end - first <= stride and first + num_blocks * stride <= storage.nbytes()
    if not (is_inside and _fills(views, end - first)) or stride % 4 or first % 4:
        raise UserError(
            f"the KV cache of {name} has the unsupported strides {views[0].stride()} for {tuple(views[0].shape)}: a"
            " block must be one piece of memory, as in the layouts LBNHC and BLNHC (VLLM_KV_CACHE_LAYOUT)"
        )
    words = torch.empty(0, dtype=torch.int32, device=views[0].device)
    return words.set_(storage, first // 4, (num_blocks, stride // 4), (stride // 4, 1))


def _fills(views: list[torch.Tensor], num_bytes: int) -> bool:
    """Whether the parts of a block fill ``num_bytes`` together. Parts of layers of different groups may overlap."""
    sizes = [view[0].numel() * view.element_size() for view in views]
    if sum(sizes) == num_bytes:
        return True
    bounds = [(_first_byte(view), _end_byte(view)) for view in views]
    is_dense = [end - first for first, end in bounds] == sizes
    ends = accumulate((end for _, end in bounds), max)
    return is_dense and all(first <= end for (first, _), end in zip(bounds[1:], ends, strict=False))


def _split(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Return one layer's cache with its blocks as first dimension; two tensors if K and V lie apart."""
    if cache.shape[0] == num_blocks:
        return [cache]
    if cache.shape[0] == 2 and cache.shape[1] == num_blocks:
        return [cache[0], cache[1]]
    if cache.shape[0] and cache.shape[0] % num_blocks == 0:  # vLLM splits blocks for kernels that want smaller ones
        return [cache.view(num_blocks, -1, *cache.shape[1:])]
    raise UserError(f"{name} has a KV cache of shape {tuple(cache.shape)}, in which {num_blocks} blocks are not found")


def _place_of(view: torch.Tensor) -> tuple[int, int]:
    """Return the address of a part's storage, and the bytes from one block to the next."""
    return view.untyped_storage().data_ptr(), int(view.stride(0)) * view.element_size()


def _first_byte(view: torch.Tensor) -> int:
    return int(view.storage_offset()) * view.element_size()


def _end_byte(view: torch.Tensor) -> int:
    """Return the offset behind the last byte of the first block."""
    steps = sum(stride * (length - 1) for stride, length in zip(view.stride()[1:], view.shape[1:], strict=True))
    return _first_byte(view) + (steps + 1) * view.element_size()
