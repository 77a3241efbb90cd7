"""Faults in the handling of blocks and slots that a copy uses: mutations for negative controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.free_blocks import BlockId
from floodplain.core.plan import Reason, Transfer, TransferKind
from floodplain.core.request import SeqId
from floodplain.core.tiers import Direction
from floodplain.core.transfers import InFlight, TransferLedger
from floodplain.memory.host import transfer as host_transfer
from floodplain.memory.swap_space import SwapSpace
from floodplain.memory.transfer import CopyResult
from floodplain.runtime.swaps import Swaps

Fault = Callable[[pytest.MonkeyPatch], None]

# -- blocks ------------------------------------------------------------------------------------------------------------


def forgets_pins_of_owned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _unpin_only_what_is_pinned(monkeypatch)
    monkeypatch.setattr(BlockLedger, "pin", lambda self, blocks: None)


def forgets_pins_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _unpin_only_what_is_pinned(monkeypatch)
    monkeypatch.setattr(BlockLedger, "pin_cached", lambda self, blocks: None)


def _unpin_only_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin = BlockLedger.unpin

    def forgiving(self: BlockLedger, blocks: Sequence[BlockId]) -> None:
        unpin(self, [block for block in blocks if block in self._pins])

    monkeypatch.setattr(BlockLedger, "unpin", forgiving)


def runs_before_the_copy_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that an inbound copy still writes are owned at once. All other books are correct."""
    resume = Swaps.resume

    def hasty(self: Swaps, seq_id: SeqId, reason: Reason, now: float) -> Transfer | None:
        transfer = resume(self, seq_id, reason, now)
        if transfer is not None:
            move = self._state.transfers[transfer.transfer_id]
            assert move.cargo is not None
            self._arrive(move.cargo, now)
            move.cargo = replace(move.cargo, table=())
        return transfer

    monkeypatch.setattr(Swaps, "resume", hasty)
    monkeypatch.setattr(Swaps, "_settle_in", lambda self, arrival, lost, now: None)


def believes_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = TransferLedger.end

    def end_well(
        self: TransferLedger[object], transfer_id: int, lost: Sequence[int]
    ) -> tuple[InFlight[object], tuple[Backup, ...]]:
        return end(self, transfer_id, () if self[transfer_id].is_inbound else lost)

    settle = Swaps._settle_in
    monkeypatch.setattr(TransferLedger, "end", end_well)
    monkeypatch.setattr(Swaps, "_settle_in", lambda self, arrival, lost, now: settle(self, arrival, (), now))


# -- slots -------------------------------------------------------------------------------------------------------------


def believes_every_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are computed but not compared."""

    def trust(
        transfer_id: int, direction: Direction, num_bytes: int, expected: np.ndarray, found: np.ndarray
    ) -> CopyResult:
        return CopyResult(transfer_id, (), num_bytes, tuple(found.tolist()))

    monkeypatch.setattr(host_transfer, "judge_copy", trust)


def mixes_up_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block returns whole, but in another block's place: digests cannot detect it."""
    start = SwapSpace.start

    def crossed(self: SwapSpace, one: Transfer) -> None:
        is_back = one.kind is TransferKind.SWAP_IN
        start(self, replace(one, locations=one.locations[::-1]) if is_back else one)

    monkeypatch.setattr(SwapSpace, "start", crossed)


def finds_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackupTable, "lose", lambda self, backup: None)
