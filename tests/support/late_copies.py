"""A transfer engine whose bytes move as late as the protocol allows, in the thread that polls.

``HostTransferEngine`` copies at once and an emulated link delays only the result, so neither finds a block that is
reused while its copy is in flight. Here copies end at random, and some fail.
"""

from __future__ import annotations

from collections import deque
from random import Random

import torch

from floodplain.core.tiers import CopyTime, Direction
from floodplain.memory.host.transfer import HostJob, HostLane
from floodplain.memory.kv_pool import KVPool
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from floodplain.memory.transfer import BlockCopy, CopyResult, check_copy


class LateTransferEngine:
    """See ``CopyEngine``. Targets of a copy are overwritten with garbage at once: they must not be read any more.

    ``dice`` decide: ``haste`` is the probability that the next copy ends, at each poll, ``failing`` that it fails,
    after half of its blocks or none. ``longest_wait`` counts polls, ``num_interrupted`` copies that failed in the
    middle.
    """

    def __init__(
        self, pool: KVPool, slots: SwapSlots, dice: Random, *, haste: float = 0.25, failing: float = 0.0
    ) -> None:
        self.longest_wait = self.num_interrupted = 0
        self.pool = pool
        self.slots = slots
        self._dice = dice
        self._haste = haste
        self._failing = failing
        self._lanes = {direction: HostLane(direction, pool, slots) for direction in Direction}
        self._scribble = torch.Generator().manual_seed(dice.getrandbits(32))
        self._queues: dict[Direction, deque[tuple[int, HostJob]]] = {direction: deque() for direction in Direction}
        self._ended: list[CopyResult] = []
        self._num_polls = 0

    @property
    def num_in_flight(self) -> int:
        return sum(map(len, self._queues.values())) + len(self._ended)

    def submit(self, transfer_id: int, copy: BlockCopy) -> None:
        check_copy(copy, self.pool, self.slots)
        if copy.direction is Direction.INBOUND:
            for words in self.pool.words:
                words[list(copy.blocks)] = self._garbage(len(copy.blocks), words.shape[1])
        else:
            self.slots.words[list(copy.slots)] = self._garbage(len(copy.slots), *self.slots.words.shape[1:])
            self.slots.digests[list(copy.slots)] = EMPTY_DIGEST
        self._queues[copy.direction].append((self._num_polls, HostJob(transfer_id, copy)))

    def poll(self) -> list[CopyResult]:
        self._num_polls += 1
        while (directions := self._busy()) and self._dice.random() < self._haste:
            self._end_by_dice(self._dice.choice(directions))
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float | None = None) -> list[CopyResult]:
        """See ``CopyEngine``. Time passes by polls, so this does not wait."""
        if not self._ended and (directions := self._busy()):
            self._end_by_dice(self._dice.choice(directions))
        return self.poll()

    def take_copy_times(self) -> list[CopyTime]:
        """See ``CopyEngine``. Where time passes by polls, copies have no times."""
        return []

    def close(self) -> None:
        for direction in Direction:
            while self._queues[direction]:
                self.land(direction)

    @property
    def coming(self) -> list[HostJob]:
        """Inbound copies in flight, in their order."""
        return [job for _, job in self._queues[Direction.INBOUND]]

    def land(self, direction: Direction, num_blocks: int | None = None) -> BlockCopy:
        """End the oldest copy of a direction; it fails if ``num_blocks`` is given, after so many of its blocks."""
        since, job = self._queues[direction].popleft()
        self.pool.expect_backed(job.copy.blocks)  # if they were unmapped during the copy, a real copy would crash
        self.longest_wait = max(self.longest_wait, self._num_polls - since)
        if num_blocks is None:
            ((_, result),) = self._lanes[direction].finish([job]).results
        else:
            result = self._interrupt(job, num_blocks)
        self._ended.append(result)
        return job.copy

    # -- inside ----------------------------------------------------------------------------------------------------

    def _busy(self) -> list[Direction]:
        return [direction for direction, queue in self._queues.items() if queue]

    def _end_by_dice(self, direction: Direction) -> None:
        num_blocks = len(self._queues[direction][0][1].copy.blocks)
        fails = self._dice.random() < self._failing
        self.land(direction, self._dice.choice((0, num_blocks // 2)) if fails else None)

    def _interrupt(self, job: HostJob, num_blocks: int) -> CopyResult:
        copy = job.copy
        lost: tuple[int, ...] = ()
        if num_blocks:
            self.num_interrupted += 1
            part = BlockCopy(copy.direction, copy.blocks[:num_blocks], copy.slots[:num_blocks])
            ((_, result),) = self._lanes[copy.direction].finish([HostJob(job.transfer_id, part)]).results
            lost = result.lost
        num_bytes = num_blocks * self.pool.layout.block_bytes
        lost += tuple(range(num_blocks, len(copy.blocks)))
        return CopyResult(job.transfer_id, lost, num_bytes, problem="interrupted by the test")

    def _garbage(self, *shape: int) -> torch.Tensor:
        """Return words that are ordinary numbers in fp32, so that only a comparison finds them."""
        return torch.randn(shape, generator=self._scribble).view(torch.int32)
