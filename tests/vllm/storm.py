"""A policy with arbitrary preemptions: at any moment, in the middle of prompts, with or without KV."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from floodplain.core.plan import Decision, Preemption, PreemptionMode, Reason
from floodplain.core.sequence import Sequence
from floodplain.core.tiers import Tier
from floodplain.core.view import View
from floodplain.policy.registry import make_policy


class StormPolicy:
    """``cfs`` with random preemptions.

    Args:
        chance: Probability that a resident request is preempted in a step.
        recompute: The share of these requests that lose their KV.
    """

    name = "storm"
    keeps_goals = False
    chooses_admissions = False

    def __init__(self, seed: int, chance: float = 0.05, recompute: float = 0.2) -> None:
        self._calm = make_policy("cfs")
        self.waiting_window, self.num_newest = self._calm.waiting_window, 0
        self._dice = Random(seed)
        self._chance, self._recompute = chance, recompute
        self.num_sent_away = 0

    def waiting_key(self, seq: Sequence) -> tuple[int, float, int]:
        return self._calm.waiting_key(seq)

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        decision = self._calm.decide(view, now, rng)
        gone = {order.seq_id for order in decision.preemptions} | view.outstanding
        rooms = {tier.tier: tier.num_free_slots for tier in view.tiers}
        more = []
        for row in view.running:
            if row.seq_id in gone or self._dice.random() >= self._chance:
                continue
            is_lost = self._dice.random() < self._recompute
            tier = None if is_lost else self._pick_tier(rooms, row.num_blocks)
            mode = PreemptionMode.RECOMPUTE if tier is None else PreemptionMode.SWAP
            more.append(Preemption(row.seq_id, mode, Reason.SLICE_ENDED, tier))
        self.num_sent_away += len(more)
        away = {order.seq_id for order in more}
        return replace(
            decision,
            preemptions=(*decision.preemptions, *more),
            decodes=tuple(seq_id for seq_id in decision.decodes if seq_id not in away),
            chunks=tuple(chunk for chunk in decision.chunks if chunk.seq_id not in away),
            backups=tuple(order for order in decision.backups if order.seq_id not in away),
        )

    def _pick_tier(self, rooms: dict[Tier, int], num_blocks: int) -> Tier | None:
        """A random tier with room for all blocks, which is then reserved."""
        found = [tier for tier, room in rooms.items() if room >= num_blocks]
        if not found:
            return None
        tier = self._dice.choice(found)
        rooms[tier] -= num_blocks
        return tier
