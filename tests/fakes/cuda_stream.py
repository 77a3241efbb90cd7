"""A stream without a GPU: staging and blocks are in this machine's memory, and the test decides when copies run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from floodplain.core.tiers import Direction
from floodplain.memory.cuda.transfer import Batch
from floodplain.memory.cuda.wires import Wire
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.transfer import BlockStore
from tests.support.waiting import HANG_S


class FakeStream:
    """A ``CudaStream``. Its work runs when a caller waits for it, once ``gate`` is open.

    Attributes:
        gate: Open at first.
        num_under_way: Copies on the stream that have not ended.
        failure: Raised by calls that wait.
        refusal: Raised by ``run``.
        num_drained: Number of ``drain`` calls.
    """

    def __init__(self, direction: Direction, store: BlockStore, wire: Wire, staging_blocks: int) -> None:
        self.staging_blocks = staging_blocks
        self.gate = threading.Event()
        self.gate.set()
        self.num_under_way = self.num_drained = 0
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self._direction, self._words, self._wire = direction, store.words, wire
        num_words = sum(words.shape[1] for words in store.words)
        self._weights = compute_weights(num_words)
        self._staging = torch.empty((staging_blocks, num_words), dtype=torch.int32)

    def run(self, batches: Sequence[Batch]) -> FakeMark:
        if self.refusal is not None:
            raise self.refusal
        self.num_under_way += 1
        return FakeMark(self, batches)

    def drain(self) -> None:
        self.num_drained += 1

    def close(self) -> None:
        assert not self.num_under_way

    def finish(self, batches: Sequence[Batch]) -> np.ndarray:
        """Run the copies; return their digests."""
        assert self.gate.wait(HANG_S), "the copies were never allowed to run"
        self.num_under_way -= 1
        if self.failure is not None:
            raise self.failure
        return np.concatenate([self._run(batch) for batch in batches])

    def _run(self, batch: Batch) -> np.ndarray:
        staging = self._staging[: len(batch.order)]
        if self._direction is Direction.OUTBOUND:
            staging[:] = torch.cat([words[batch.blocks] for words in self._words], dim=1)
        for row, slot, count in batch.runs:
            self._wire.copy(self._direction, staging[row : row + count], slot)
        if self._direction is Direction.INBOUND:
            parts = staging.split([words.shape[1] for words in self._words], dim=1)
            for words, part in zip(self._words, parts, strict=True):
                words[batch.blocks] = part
        return compute_digests(staging.numpy(), self._weights)


class FakeMark:
    """A ``CudaMark``."""

    def __init__(self, stream: FakeStream, batches: Sequence[Batch]) -> None:
        self._stream, self._batches = stream, batches

    def wait(self) -> tuple[np.ndarray, float]:
        return self._stream.finish(self._batches), 0.25
