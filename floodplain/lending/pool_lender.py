"""The producer's side of an engine: what the policy wants to lend, the agent puts up and the engine gives way for.

``Northbound`` is all that an engine must report and obey, so that other engines can lend, too: docs/design/006.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from floodplain.core.sizes import format_size
from floodplain.lending.membership import Membership
from floodplain.policy.lending import LendingDecision, LendingPolicy, PoolLoad

logger = logging.getLogger(__name__)

_AT_ONCE = float("-inf")


class Northbound(Protocol):
    """A serving engine that lends. Called on the thread that launches its steps, while none is outstanding.

    Bytes are its own on the device, parameters included. Whatever it is told, requests in flight go on.
    """

    @property
    def full_bytes(self) -> int:
        """Its bytes while it lends nothing. They never change."""

    @property
    def quantum_bytes(self) -> int:
        """It gives way and takes back by so many; a smaller change may change nothing."""

    @property
    def block_bytes(self) -> int:
        """Of one block of the load that it reports."""

    @property
    def own_bytes(self) -> int:
        """Its bytes now."""

    def report(self, now: float) -> PoolLoad:
        """Its load, at ``now``."""

    def give_way(self, to_bytes: int) -> None:
        """Come nearer to ``to_bytes`` from above, by as much as delays no step by more than some milliseconds.

        It may stop above what it is told: requests keep their memory. What it gives is free when this returns.
        """

    def take_back(self, to_bytes: int) -> None:
        """Come nearer to ``to_bytes`` from below, by as much, and never above it.

        The bytes ought to be free. If they are not, nothing changes and it is told so again, later.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderTimes:
    """How often a lender looks.

    Attributes:
        look_s: Seconds between two looks at the load: a small part of the time that leads to a recall.
        retry_s: Seconds until it tries again what did not succeed: others freed nothing, or copies held the blocks.
    """

    look_s: float = 0.05
    retry_s: float = 0.5


class PoolLender:
    """See the module. ``at_boundary`` costs two comparisons while there is nothing to do.

    Args:
        engine: Who lends.
        policy: How much.
        membership: Of the engine's process.
        can_offer: Whether a coordinator would hear of an offer. A recall is always said, whoever listens.
        times: How often it looks.
        guest_bytes: Of what the engine gives way, so much is not put up: what a consumer's process takes beside it.

    Attributes:
        is_moving: Whether the last boundary moved bytes, so that the next one will, too: it should come soon.
    """

    def __init__(
        self,
        engine: Northbound,
        policy: LendingPolicy,
        membership: Membership,
        can_offer: Callable[[], bool],
        times: LenderTimes | None = None,
        guest_bytes: int = 0,
    ) -> None:
        self.is_moving = False
        self._guest_bytes = guest_bytes
        self._engine = engine
        self._policy = policy
        self._membership = membership
        self._can_offer = can_offer
        self._times = times or LenderTimes()
        self._target_bytes = self._put_up_bytes = 0
        self._version = membership.version
        self._look_due_s = self._move_due_s = _AT_ONCE
        membership.claim(engine.own_bytes, engine.own_bytes)

    @property
    def target_bytes(self) -> int:
        """What it wants to lend."""
        return self._target_bytes

    def at_boundary(self, now: float) -> None:
        """Look at the load and at what the coordinator says, if it is time, and move some bytes if that is due."""
        if self._version != self._membership.version:
            self._version = self._membership.version
            self._move_due_s = _AT_ONCE
        if now >= self._look_due_s:
            self._look(now)
        if now >= self._move_due_s:
            self._move(now)

    def _look(self, now: float) -> None:
        self._look_due_s = now + self._times.look_s
        load = replace(self._engine.report(now), can_offer=self._can_offer())
        decision = self._policy.decide(load)
        target_bytes = decision.target_blocks * self._engine.block_bytes
        if target_bytes != self._target_bytes:
            self._say(decision, target_bytes)
            self._target_bytes = target_bytes
            self._move_due_s = _AT_ONCE
            self._put_up()

    def _move(self, now: float) -> None:
        before = self._engine.own_bytes
        wanted = self._engine.full_bytes - self._target_bytes
        if before - wanted >= self._engine.quantum_bytes:
            self._give_way(wanted)
        elif before < wanted:
            allowed = self._membership.claim(wanted, before)
            if allowed > before:
                self._engine.take_back(allowed)
        self.is_moving = self._engine.own_bytes != before
        self._move_due_s = _AT_ONCE if self.is_moving else now + self._times.retry_s

    def _give_way(self, to_bytes: int) -> None:
        self._engine.give_way(to_bytes)
        own_bytes = self._engine.own_bytes
        self._membership.claim(own_bytes, own_bytes)
        self._put_up()

    def _put_up(self) -> None:
        """Tell the agent what there is to lend: what the engine has given way for, and no more than it wants to."""
        given_bytes = max(0, self._engine.full_bytes - self._engine.own_bytes)
        put_up_bytes = max(0, min(self._target_bytes, given_bytes) - self._guest_bytes)
        if put_up_bytes != self._put_up_bytes:
            self._put_up_bytes = put_up_bytes
            self._membership.lend(put_up_bytes)

    def _say(self, decision: LendingDecision, target_bytes: int) -> None:
        if target_bytes:
            logger.info("up to %s of the KV pool are for neighbours from now on", format_size(target_bytes))
        else:
            logger.info("all of the KV pool is recalled (%s)", decision.reason.value)
