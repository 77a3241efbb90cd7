"""Policies for real engines that swap more than a sensible one, and a look into the swap space of such an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from floodplain.core.plan import Decision, Preemption, PreemptionMode, Reason, Resumption
from floodplain.core.request import SeqId
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, View
from floodplain.memory.swap_slots import SwapSlots
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.prices import StepPrices
from tests.support.driven import Driven
from tests.support.loops import RandomPolicy, is_under_way

BLOCK_BYTES = 8192
"""Bytes of a block of tiny-llama in fp32: 2 layers of K and V, 16 tokens, 2 heads, 16 elements."""


@contextmanager
def unknown_prices() -> Iterator[None]:
    """Make prices unknown: policies then swap, however quickly this machine computes a tiny model's prompt."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepPrices, "now", property(lambda self: Prices()))
        yield


class ImpatientPolicy(RandomPolicy):
    """Rests after repeated decisions about one step, and mostly waits for copies of requests that it wants back."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = 0.0
        self._num_asked = 0

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        self._num_asked = self._num_asked + 1 if now == self._last_s else 1
        self._last_s = now
        num_resident = len(view.running) + len(view.swapped)
        if self._num_asked > 1 + num_resident or (self._num_asked > 1 and is_under_way(view)):
            return self.rest(view, now, rng)  # repeated decision about one step, after moves that needed no copy
        decision = super().decide(view, now, rng)
        leaving = {row.seq_id for row in view.swapped if row.is_leaving}
        if any(order.seq_id in leaving for order in decision.resumptions) and rng.random() < 0.9:
            return Decision()  # those copies are in flight
        return decision


class Swapping(Driven):
    """An engine under ``ImpatientPolicy``, and its swap space."""

    @property
    def slots(self) -> SwapSlots:
        """The slots of swap space, with their bytes."""
        executor: Any = self.engine._executor
        slots: SwapSlots = executor._swap._tiers[Tier.HOST].slots
        return slots

    @property
    def num_refusals(self) -> int:
        """How often swap space had no room."""
        policy = self.engine.loop.policy
        assert isinstance(policy, ImpatientPolicy)
        return policy.num_refusals

    def whole_slots(self) -> list[int]:
        """Slots of whole backups, which may be read."""
        state = self.engine.loop.state
        seqs = state.sequences.values()
        kept = [backup for seq in seqs for backup in (*seq.backups, *((seq.tail[0],) if seq.tail else ()))]
        assert state.backups.slots[Tier.HOST].num_slots == self.slots.num_slots
        return [backup.location.slot for backup in kept if backup.is_whole]


class SwapOncePolicy(FcfsPolicy):
    """Swaps one request out once, as soon as it decodes, and resumes it when its copy has ended."""

    name = "swap once"

    def __init__(self, victim: int = 0) -> None:
        super().__init__()
        self._victim = SeqId(victim)
        self._is_done = False

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        is_due = any(row.seq_id == self._victim and row.is_decoding for row in view.running)
        if is_due and not self._is_done:
            self._is_done = True
            order = Preemption(self._victim, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
            return Decision(preemptions=(order,))
        back = [row for row in view.swapped if not row.is_leaving]
        if back:
            return Decision(resumptions=(Resumption(back[0].seq_id, Reason.SLICE_BEGINS),))
        return super().decide(view, now, rng)
