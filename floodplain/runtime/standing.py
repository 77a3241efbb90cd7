"""The last decision of a policy, and whether it stands for the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import takewhile

from floodplain.core.plan import Decision, StepPlan
from floodplain.core.request import SeqId
from floodplain.core.view import View
from floodplain.policy.base import Policy, Standing, StandingPolicy
from floodplain.runtime.state import LoopState

SPARE_SAVED = 32
"""Saved blocks beyond those at risk that are counted: so many can be evicted before they are counted again."""


class LastDecision:
    """Repeats a decision that only decodes, for as long as it stands by its policy's ``Standing``.

    The policy decides again after a new request, one that ended, a copy, or a change of the pool.
    """

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._decision = Decision()
        self._standing: Standing | None = None
        self._facts: Hashable = None
        self._end_step = 0
        self._saved: tuple[int, int] | None = None  # cached blocks then, and those evicted next that have backups
        self._num_due: Counter[int] = Counter()  # decodes that need a block, by step modulo the tokens of a block

    def note(self, policy: Policy, view: View, decision: Decision) -> None:
        """Note a decision of the policy; call ``keep`` when its plan is made."""
        self._standing = None
        if view.depth > 1 or len(decision.decodes) < len(view.running) or not _only_decodes(decision):
            return
        self._standing = policy.stands(view) if isinstance(policy, StandingPolicy) else None
        if self._standing is not None:
            self._decision = decision
            self._end_step = min([row.end_step for row in view.running], default=0)
            self._num_due = Counter([row.block_due_step % view.block_tokens for row in view.running])
            self._saved = None

    def keep(self, plan: StepPlan) -> None:
        """Note that the decision's plan is made: what changes from now on may change the decision."""
        if plan.transfers:
            self._standing = None
        elif self._standing is not None:
            self._facts = self._see()

    @property
    def decodes(self) -> tuple[SeqId, ...]:
        """The sequences that decode in every step while it stands; empty if it does not."""
        return self._decision.decodes if self._standing is not None else ()

    def find(self, step: int) -> Decision | None:
        """The last decision if it stands for this step, else None."""
        standing, ledger = self._standing, self._state.ledger
        if standing is None or step >= self._end_step:
            return None
        if not self._has_room(standing, step, ledger.num_empty, ledger.num_cached):
            return None
        if self._facts != self._see():
            self._standing = None
            return None
        return self._decision

    def count_ahead(self, step: int, most: int) -> int:
        """For how many steps, at most ``most``, the decision stands and none of its sequences ends."""
        standing, ledger = self._standing, self._state.ledger
        if standing is None or self.find(step) is None:
            return 0
        num_empty, num_cached = ledger.num_empty, ledger.num_cached
        most = max(0, min(most, self._end_step - 1 - step))  # the step after these gives a last token
        for num_steps in range(most):
            if not self._has_room(standing, step + num_steps, num_empty, num_cached):
                return num_steps
            num_empty -= self._num_due[(step + num_steps) % ledger.block_tokens]
            num_empty, num_cached = max(0, num_empty), num_cached + min(0, num_empty)
        return most

    def _has_room(self, standing: Standing, step: int, num_empty: int, num_cached: int) -> bool:
        """Whether a step has its blocks, and evicts no prefix that should be saved first."""
        num_due = self._num_due[step % self._state.ledger.block_tokens]
        if num_empty + num_cached < max(standing.least_available, num_due):
            return False
        if num_empty >= standing.num_at_risk:
            return True
        if self._saved is None:
            self._saved = self._state.ledger.num_cached, self._count_saved(standing.num_at_risk + SPARE_SAVED)
        num_then, num_saved = self._saved
        return num_saved - (num_then - num_cached) >= min(standing.num_at_risk, num_cached)

    def _count_saved(self, most: int) -> int:
        """Of the cached blocks that are evicted next, those before the first that has no backup."""
        backups = self._state.backups
        return sum(1 for _ in takewhile(lambda one: backups.find(one[1]), self._state.ledger.next_evicted(most)))

    def _see(self) -> Hashable:
        """What changes whenever a sequence or the pool changes, but for tokens and the blocks for them."""
        state = self._state
        slots = [one.num_slots for one in state.backups.slots.values()]
        return (
            state.row_changes.version, state.sharing_changes.version, state.ledger.sharing_version, len(state.waiting),
            len(state.transfers), state.backups.changed_keys.version, state.ledger.num_blocks, sum(slots),
            state.num_returning_blocks, len(state.sequences), len(state.stale_tables),
        )  # fmt: skip


def _only_decodes(decision: Decision) -> bool:
    others = (decision.preemptions, decision.resumptions, decision.chunks, decision.admissions, decision.backups)
    return bool(decision.decodes) and not any(others)
