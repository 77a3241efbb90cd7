"""Gather and scatter of KV blocks with their digests on a GPU, and copies of pieces of a layer to and from it.

Imports triton: load it lazily. Digests are sums of integers, so the order of programs does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from floodplain.memory.digest import WEIGHT_FACTOR, WEIGHT_MASK

_STRETCH_WORDS = 1024
_MOST_PROGRAMS = 64
"""Of one copy of pieces: 256 KiB in flight, as a link of 55 GB/s has that answers after 4 µs. More would only take
multiprocessors from compute."""
_FACTOR = tl.constexpr(WEIGHT_FACTOR)
_MASK = tl.constexpr(WEIGHT_MASK)


@triton.jit
def _add_digest(digest, words, positions):  # type: ignore[no-untyped-def]
    weights = ((positions.to(tl.int64) * _FACTOR) & _MASK) * 2 + 1
    tl.atomic_add(digest, tl.sum(words.to(tl.int64) * weights))


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(bases, blocks, staging, digests, num_layers, block_words, stretch: tl.constexpr):  # type: ignore[no-untyped-def]
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.program_id(2) * stretch + tl.arange(0, stretch)
    is_inside = places < block_words
    base = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int32)), 16)  # so that lanes move 16 bytes
    words = tl.load(base + tl.load(blocks + row) * block_words + places, mask=is_inside, other=0)
    tl.store(staging + (row * num_layers + layer) * block_words + places, words, mask=is_inside)
    _add_digest(digests + row, words, layer * block_words + places)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter_kernel(bases, blocks, staging, digests, num_layers, block_words, stretch: tl.constexpr):  # type: ignore[no-untyped-def]
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.program_id(2) * stretch + tl.arange(0, stretch)
    is_inside = places < block_words
    words = tl.load(staging + (row * num_layers + layer) * block_words + places, mask=is_inside, other=0)
    base = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int32)), 16)  # so that lanes move 16 bytes
    tl.store(base + tl.load(blocks + row) * block_words + places, words, mask=is_inside)
    _add_digest(digests + row, words, layer * block_words + places)


@triton.jit  # type: ignore[untyped-decorator]
def _digest_kernel(staging, digests, num_words, stretch: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * stretch + tl.arange(0, stretch)
    words = tl.load(staging + row * num_words + places, mask=places < num_words, other=0)
    _add_digest(digests + row, words, places)


@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def _pieces_kernel(target, source, ids, num_pieces, piece_words, stretch: tl.constexpr):  # type: ignore[no-untyped-def]
    to = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)  # so that lanes move 16 bytes
    origin = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    num_parts = tl.cdiv(piece_words, stretch)
    for index in range(tl.program_id(0), num_pieces * num_parts, tl.num_programs(0)):
        places = index % num_parts * stretch + tl.arange(0, stretch)
        is_inside = places < piece_words
        first = tl.load(ids + index // num_parts) * piece_words
        tl.store(to + first + places, tl.load(origin + first + places, mask=is_inside), mask=is_inside)


def gather(bases: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor, digests: torch.Tensor) -> None:
    """Copy scattered blocks into staging, on the current stream, adding to their digests.

    ``bases`` are addresses of layers, int64 [num_layers]; ``blocks`` int64 [n]; ``staging`` int32 [n or more,
    num_layers, layer_block_words], contiguous; ``digests`` int64 [n], beginning at ``digest.SEED``.
    """
    _gather_kernel[_grid(blocks, staging)](bases, blocks, staging, digests, *staging.shape[1:], stretch=_STRETCH_WORDS)


def scatter(bases: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor, digests: torch.Tensor) -> None:
    """Copy staging to scattered blocks: the inverse of ``gather``, with the same arguments."""
    _scatter_kernel[_grid(blocks, staging)](bases, blocks, staging, digests, *staging.shape[1:], stretch=_STRETCH_WORDS)


def add_digests(staging: torch.Tensor, digests: torch.Tensor) -> None:
    """Add to the digests (``gather``) of blocks in staging: int32 [n, num_layers, layer_block_words], contiguous."""
    num_words = staging[0].numel()
    grid = (len(staging), triton.cdiv(num_words, _STRETCH_WORDS))
    _digest_kernel[grid](staging, digests, num_words, stretch=_STRETCH_WORDS)


def copy_pieces(target: int, source: int, ids: torch.Tensor, piece_words: int) -> None:
    """Copy pieces from one address to another, each to its own place; on the current stream.

    Both are multiples of 16 in memory that the GPU reaches: its own, page-locked, or a neighbour's. ``ids`` are counted
    from there, int64 [n] on the GPU; each piece has ``piece_words`` 32-bit words.
    """
    num_programs = min(_MOST_PROGRAMS, len(ids) * triton.cdiv(piece_words, _STRETCH_WORDS))
    _pieces_kernel[(num_programs,)](target, source, ids, len(ids), piece_words, stretch=_STRETCH_WORDS)


def _grid(blocks: torch.Tensor, staging: torch.Tensor) -> tuple[int, int, int]:
    _, num_layers, block_words = staging.shape
    return len(blocks), num_layers, triton.cdiv(block_words, _STRETCH_WORDS)
