"""Attention of prefill chunks over a paged KV, by FlashInfer if it is installed.

All chunks of a step are one launch, and contexts are read in place. Written against flashinfer-python 0.7.2
(docs.flashinfer.ai/api/prefill.html), which compiles a kernel for a dtype and a head size on first use.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from floodplain.model.attention.backend import AttentionShape
from floodplain.model.batch import PrefillSegment

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "FLOODPLAIN_NO_FLASHINFER"
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""Other sizes are refused: FlashInfer accepts some and computes wrong results (flashinfer-ai/flashinfer issue 4299)."""

_KERNELS = "fa2"
"""This backend reads values past a context as zero; here they may be NaN. By default FlashInfer uses "fa3" on Hopper,
which once let such NaN through (flashinfer-ai/flashinfer pull request 1029)."""

_MAX_TILE_ROWS = 128
_TILES_PER_PROCESSOR = 2


def refuse_flashinfer(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer does not compute prefills, as text for a log; None if it does."""
    if device_type != "cuda":
        return f"it does not run on {device_type}"
    if os.environ.get(DISABLE_VARIABLE):
        return f"{DISABLE_VARIABLE} is set"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    if dtype not in DTYPES:
        return f"it has no prefill for {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it has no prefill for heads of {head_dim} numbers"
    return None


def open_flashinfer(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, num_processors: int
) -> FlashInferPrefill | None:
    """FlashInfer with a workspace on ``device``; None if it is refused. Logs the choice and its reason."""
    refusal = refuse_flashinfer(device.type, dtype, shape.head_dim)
    if refusal is not None:
        logger.info("prefills are computed by torch, not FlashInfer: %s", refusal)
        return None
    import flashinfer

    prefill = FlashInferPrefill(flashinfer, shape, dtype, device, num_processors)
    logger.info(
        "prefills are computed by FlashInfer %s, which compiles on first use (%s=1 turns it off)",
        getattr(flashinfer, "__version__", "of unknown version"),
        DISABLE_VARIABLE,
    )
    return prefill


def workspace_bytes(shape: AttentionShape, num_processors: int) -> int:
    """Bytes for partial results when long contexts are split; FlashInfer's recommended 128 MiB may be too little.

    It splits only up to two tiles per multiprocessor (``scheduler.cuh``); a tile is at most 128 rows, each with a
    head's output and its log-sum in float32.
    """
    tiles = _TILES_PER_PROCESSOR * num_processors
    alignment = 4096
    return shape.group_size * tiles * _MAX_TILE_ROWS * (shape.head_dim + 1) * 4 + alignment


class PagedSegments(NamedTuple):
    """The S segments of a batch in FlashInfer's format, int32, in the order of its ``plan``. It reads all but the
    blocks on the host.

    Attributes:
        row_begins: The first row of each segment among the rows of all, then the number of rows, [S + 1].
        block_begins: The same for blocks.
        blocks: On the device, the blocks of each context in turn.
        num_last_tokens: Tokens in the last block of each context, [S].
    """

    row_begins: torch.Tensor
    block_begins: torch.Tensor
    blocks: torch.Tensor
    num_last_tokens: torch.Tensor


def page_segments(segments: Sequence[PrefillSegment], block_tokens: int) -> PagedSegments:
    """The segments of a batch for FlashInfer. Does not block on the device."""
    counts = [-(-segment.context_len // block_tokens) for segment in segments]
    tables = [segment.block_table[:count] for segment, count in zip(segments, counts, strict=True)]
    return PagedSegments(
        _host_int32(accumulate((segment.num_tokens for segment in segments), initial=0)),
        _host_int32(accumulate(counts, initial=0)),
        torch.cat(tables).to(torch.int32),
        _host_int32((segment.context_len - 1) % block_tokens + 1 for segment in segments),
    )


class FlashInferPrefill:
    """Prefills of one batch at a time: call ``plan`` once per step, then ``run`` in each layer."""

    def __init__(
        self, module: Any, shape: AttentionShape, dtype: torch.dtype, device: torch.device, num_processors: int
    ) -> None:
        self._shape, self._dtype = shape, dtype
        workspace = torch.empty(workspace_bytes(shape, num_processors), dtype=torch.uint8, device=device)
        self._wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=_KERNELS)
        self._planned = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def plan(self, segments: Sequence[PrefillSegment]) -> None:
        """Prepare the prefills of a step, at least one; the previous plan cannot be run any more."""
        paged = page_segments(segments, self._shape.block_tokens)
        with torch.cuda.device_of(paged.blocks):  # type: ignore[no-untyped-call]  # as for Triton
            if self._planned is not None:
                # A plan is copied from one pinned buffer, which must not change before the last copy is done. A step
                # that samples nothing ends without waiting for the device, so that copy may still be under way.
                self._planned.synchronize()
            self._wrapper.plan(
                *paged,
                num_qo_heads=self._shape.num_heads,
                num_kv_heads=self._shape.num_kv_heads,
                head_dim_qk=self._shape.head_dim,
                page_size=self._shape.block_tokens,
                causal=True,  # the last query sees the whole context
                sm_scale=self._shape.scale,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
            if self._planned is not None:
                self._planned.record()

    def run(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of the planned segments into ``out``, contiguous, of the shape of ``q``.

        ``q`` is [rows of all segments, num_heads, head_dim], its last two dimensions contiguous; ``kv`` [num_blocks, 2,
        block_tokens, num_kv_heads, head_dim] has the segments' own tokens already.
        """
        with torch.cuda.device_of(kv):  # type: ignore[no-untyped-call]
            self._wrapper.run(q, kv, out=out)


def _host_int32(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32)
