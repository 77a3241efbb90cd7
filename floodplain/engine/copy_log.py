"""Records the copies of each live request's KV, for traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from floodplain.core.lifecycle import CopiedKV
from floodplain.core.plan import Transfer
from floodplain.core.request import SeqId


class CopyLog:
    """Copies that ended, by request, until ``take``. ``block_bytes``: of one KV block over all layers."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._begun: dict[int, tuple[Transfer, float]] = {}
        self._ended: dict[SeqId, list[CopiedKV]] = {}

    def begin(self, transfers: Iterable[Transfer], now: float) -> None:
        """Note the copies of a new plan; those that belong to no request are left out."""
        for transfer in transfers:
            if transfer.seq_id is not None:
                self._begun[transfer.transfer_id] = transfer, now
                self._ended.setdefault(transfer.seq_id, [])

    def end(self, transfer_ids: Iterable[int], now: float) -> None:
        """Note that copies have ended, one entry for each tier; those of requests that were taken are dropped."""
        for transfer, begin_s in (self._begun.pop(one) for one in transfer_ids if one in self._begun):
            copies = self._ended.get(transfer.seq_id) if transfer.seq_id is not None else None
            if copies is not None:
                num_blocks = Counter(location.tier for location in transfer.locations)
                copies += (
                    CopiedKV(transfer.kind, tier, number * self._block_bytes, begin_s, now)
                    for tier, number in num_blocks.items()
                )

    def take(self, seq_id: SeqId) -> tuple[CopiedKV, ...]:
        """The copies of a request that has ended; they are forgotten."""
        return tuple(self._ended.pop(seq_id, ()))
