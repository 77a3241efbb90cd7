"""Swap space: its tiers, each an engine that copies between the KV pool and the tier's slots."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from floodplain.core.errors import InvariantError
from floodplain.core.plan import Transfer, TransferKind
from floodplain.core.tiers import CopyTime, Direction, Tier
from floodplain.memory.swap_slots import EMPTY_DIGEST
from floodplain.memory.transfer import BlockCopy, CopyEngine, CopyResult

logger = logging.getLogger(__name__)

_POLL_S = 1e-3
"""Seconds to wait for one tier while another one has copies under way too."""


class Problem(Enum):
    """Why a copy is not whole."""

    DIGEST_MISMATCH = "digest_mismatch"
    EMPTY_SLOT = "empty_slot"
    NOT_COPIED = "not_copied"


@dataclass(frozen=True, slots=True)
class SwapStats:
    """Totals since the start: bytes by kind of transfer and tier, and by problem the copies that were not whole."""

    moved_bytes: Mapping[tuple[TransferKind, Tier], int] = field(default_factory=dict)
    failed_copies: Mapping[Problem, int] = field(default_factory=lambda: dict.fromkeys(Problem, 0))

    @property
    def backup_bytes(self) -> int:
        """Bytes that were backed up ahead, while their request still ran."""
        return sum(count for (kind, _), count in self.moved_bytes.items() if kind is TransferKind.BACKUP)

    @property
    def traffic_bytes(self) -> dict[tuple[str, str], int]:
        """All bytes by (``out`` or ``in``, tier); backups count as ``out``."""
        traffic: dict[tuple[str, str], int] = {}
        for (kind, tier), count in self.moved_bytes.items():
            key = ("in" if kind.direction is Direction.INBOUND else "out", tier.value)
            traffic[key] = traffic.get(key, 0) + count
        return traffic


@dataclass(slots=True)
class _Open:
    """A transfer under way: places in ``transfer.blocks`` that move in each unfinished tier, and those lost so far."""

    transfer: Transfer
    parts: dict[Tier, list[int]]
    lost: list[int] = field(default_factory=list)


class SwapSpace:
    """Runs the transfers of step plans. One thread starts and polls; ``stats`` may be called from any.

    ``tiers`` come nearest first, as started engines; the swap space owns them and their slots.
    """

    def __init__(self, tiers: Mapping[Tier, CopyEngine[Any]]) -> None:
        self._tiers = dict(tiers)
        self._open: dict[int, _Open] = {}
        self._moved_bytes = {(kind, tier): 0 for kind in TransferKind for tier in tiers}
        self._failed_copies = dict.fromkeys(Problem, 0)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self._open)

    def start(self, transfer: Transfer) -> None:
        """Begin a transfer and return at once; ``InvariantError`` without such a place, or if it is under way."""
        parts = _parts(transfer)
        if transfer.transfer_id in self._open or not parts or not parts.keys() <= self._tiers.keys():
            wanted = [tier.value for tier in parts]
            raise InvariantError(f"transfer {transfer.transfer_id} to {wanted} cannot begin in this swap space")
        for tier, places in parts.items():
            self._tiers[tier].submit(transfer.transfer_id, _copy(transfer, places))
        self._open[transfer.transfer_id] = _Open(transfer, parts)

    def poll(self) -> list[tuple[int, Sequence[int]]]:
        """Ended transfers: (id, places in ``Transfer.blocks`` of blocks that did not arrive whole, ascending)."""
        return [ended for tier, engine in self._tiers.items() for ended in self._take(tier, engine.poll())]

    def wait(self, timeout_s: float) -> list[tuple[int, Sequence[int]]]:
        """As ``poll``, but waits for the first to end; empty if none is under way or the time is over."""
        end_s = time.monotonic() + timeout_s
        ended = self.poll()
        while not ended and self._open and (left_s := end_s - time.monotonic()) > 0:
            busy = [(tier, engine) for tier, engine in self._tiers.items() if engine.num_in_flight]
            poll_s = left_s if len(busy) == 1 else min(left_s, _POLL_S)
            for tier, engine in busy:
                ended += self._take(tier, engine.wait(poll_s))
        return ended

    def take_copy_times(self) -> list[CopyTime]:
        """How long links were busy with the copies that ended since the last call."""
        return [copied for engine in self._tiers.values() for copied in engine.take_copy_times()]

    def close(self) -> None:
        """Let the copies in flight end, and close engines and slots. Safe to call twice."""
        for engine in self._tiers.values():
            engine.close()
            engine.slots.close()
        self._tiers.clear()
        self._open.clear()

    def stats(self) -> SwapStats:
        """Totals so far; also valid after ``close``."""
        return SwapStats(dict(self._moved_bytes), dict(self._failed_copies))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, tier: Tier, results: Sequence[CopyResult]) -> list[tuple[int, Sequence[int]]]:
        """Count the results of one tier; return the transfers that ended with them."""
        ended: list[tuple[int, Sequence[int]]] = []
        for result in results:
            one = self._open[result.transfer_id]
            self._moved_bytes[one.transfer.kind, tier] += result.num_bytes
            places = one.parts.pop(tier)
            if not result.is_whole:
                one.lost += [places[index] for index in result.lost]
                self._note_failure(tier, _copy(one.transfer, places), one.transfer, result)
            if not one.parts:
                del self._open[result.transfer_id]
                ended.append((result.transfer_id, sorted(one.lost)))
        return ended

    def _note_failure(self, tier: Tier, copy: BlockCopy, transfer: Transfer, result: CopyResult) -> None:
        expected = self._tiers[tier].slots.digests[list(copy.slots)]
        if not result.digests:
            problem = Problem.NOT_COPIED
        else:
            problem = Problem.EMPTY_SLOT if (expected == EMPTY_DIGEST).any() else Problem.DIGEST_MISMATCH
        self._failed_copies[problem] += 1
        what = f"{transfer.kind.value} {transfer.transfer_id} of sequence {transfer.seq_id}"
        part = f"{len(result.lost)} of {len(copy.blocks)} blocks"
        logger.warning("%s over %s: %s are lost and computed again: %s", what, tier.value, part, result.problem)


def _parts(transfer: Transfer) -> dict[Tier, list[int]]:
    """Places in ``transfer.blocks`` of the blocks that move in each tier."""
    parts: dict[Tier, list[int]] = {}
    for place, location in enumerate(transfer.locations):
        parts.setdefault(location.tier, []).append(place)
    return parts


def _copy(transfer: Transfer, places: Sequence[int]) -> BlockCopy:
    blocks = tuple(transfer.blocks[place] for place in places)
    return BlockCopy(transfer.kind.direction, blocks, tuple(transfer.locations[place].slot for place in places))
