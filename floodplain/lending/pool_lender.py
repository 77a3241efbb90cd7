"""The producer's side of an engine: the policy sets how much to lend, the engine shrinks, and the agent offers it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from floodplain.core.sizes import show_size
from floodplain.lending.membership import Membership
from floodplain.policy.lending import LendingDecision, LendingPolicy, PoolLoad
from floodplain.runtime.loop import Loop

logger = logging.getLogger(__name__)

_AT_ONCE = float("-inf")


class Northbound(Protocol):
    """A serving engine that lends. Called on the thread that launches its steps, while none is outstanding.

    Bytes are its own on the device, parameters included. No call ends requests in flight.
    """

    @property
    def full_bytes(self) -> int:
        """The engine's bytes while it lends nothing. They never change."""

    @property
    def quantum_bytes(self) -> int:
        """The unit by which it shrinks and grows; a smaller change may have no effect."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the load that it reports."""

    @property
    def own_bytes(self) -> int:
        """The engine's bytes now."""

    def report(self, now: float) -> PoolLoad:
        """Return its load at ``now``."""

    def give_way(self, to_bytes: int) -> None:
        """Shrink towards ``to_bytes``, by as much as delays no step by more than some milliseconds.

        It may stop above ``to_bytes``: requests keep their memory. What it releases is free when this returns.
        """

    def take_back(self, to_bytes: int) -> None:
        """Grow towards ``to_bytes`` by as much, never beyond. No-op if the bytes are not free; it is called again."""


def report_load(loop: Loop, full_blocks: int, now: float) -> PoolLoad:
    """The load of an engine with a pool of ``full_blocks``; swapped requests count as waiting, loading ones not."""
    state, ledger = loop.state, loop.state.ledger
    return PoolLoad(
        now=now,
        num_waiting=len(state.waiting) + len(state.swapped),
        num_used_blocks=ledger.num_blocks - ledger.num_available,
        num_blocks=ledger.num_blocks,
        full_blocks=full_blocks,
        num_arrived=loop.num_submitted,
    )


LOAD_LOOK_S = 0.05
"""The default interval of checks of the load: a small part of the time that leads to a recall."""
RETRY_S = 0.5
"""A lender repeats what failed after this time: others freed nothing, or copies held the blocks."""


class PoolLender:
    """Moves memory between an engine and its consumers at boundaries. Idle, a boundary costs a few comparisons.

    ``can_offer``: whether an offer would reach a coordinator. A recall does not depend on it. ``guest_bytes``: of what
    the engine releases, so much is not offered: consumers' contexts take it.

    ``is_moving``: whether the last boundary moved bytes, so that the next one should come soon.
    """

    def __init__(
        self,
        engine: Northbound,
        policy: LendingPolicy,
        membership: Membership,
        can_offer: Callable[[], bool],
        look_s: float = LOAD_LOOK_S,
        guest_bytes: int = 0,
    ) -> None:
        self.is_moving = False
        self._engine, self._policy, self._membership = engine, policy, membership
        self._can_offer, self._look_s, self._guest_bytes = can_offer, look_s, guest_bytes
        self._target_bytes = self._put_up_bytes = 0
        self._version = membership.version
        self._look_due_s = self._move_due_s = _AT_ONCE
        membership.claim(engine.own_bytes, engine.own_bytes)

    def at_boundary(self, now: float) -> None:
        """Check the load and the coordinator's answers if it is time, and move some bytes if that is due."""
        if self._version != self._membership.version:
            self._version = self._membership.version
            self._move_due_s = _AT_ONCE
        if now >= self._look_due_s:
            self._look(now)
        if now >= self._move_due_s:
            self._move(now)

    def _look(self, now: float) -> None:
        self._look_due_s = now + self._look_s
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
        self._move_due_s = _AT_ONCE if self.is_moving else now + RETRY_S

    def _give_way(self, to_bytes: int) -> None:
        self._engine.give_way(to_bytes)
        own_bytes = self._engine.own_bytes
        self._membership.claim(own_bytes, own_bytes)
        self._put_up()

    def _put_up(self) -> None:
        """Lend what the engine has released, and no more than the target."""
        given_bytes = max(0, self._engine.full_bytes - self._engine.own_bytes)
        put_up_bytes = max(0, min(self._target_bytes, given_bytes) - self._guest_bytes)
        if put_up_bytes != self._put_up_bytes:
            self._put_up_bytes = put_up_bytes
            self._membership.lend(put_up_bytes)

    def _say(self, decision: LendingDecision, target_bytes: int) -> None:
        if target_bytes:
            logger.info("up to %s of the KV pool are for neighbours from now on", show_size(target_bytes))
        else:
            logger.info("all of the KV pool is recalled (%s)", decision.reason.value)
