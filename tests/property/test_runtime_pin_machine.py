"""Pins of ended requests' KV under any interleaving of steps and copies: the loop's laws and tokens are unchanged."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from floodplain.policy.base import Policy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.sessions import SessionBook
from tests.property.test_runtime_machine import LoopMachine
from tests.support.examples import examples
from tests.support.loops import AheadPolicy, RandomPolicy


class PinningMachine(LoopMachine):
    """The same loop, with the KV of ended requests pinned."""

    @initialize(
        depth=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from([RandomPolicy, AheadPolicy, FcfsPolicy]),
        num_slots=st.sampled_from([5, 40]),
        seed=st.integers(0, 2**16),
        budget=st.integers(1, 12),
    )
    def begin(self, depth: int, policy: type[Policy], num_slots: int, seed: int, budget: int) -> None:
        begin = LoopMachine.begin
        getattr(begin, "__wrapped__", begin)(self, depth, policy, num_slots, True, seed, budget)
        self.loop.state.sessions = SessionBook(self.loop.state.backups)

    @invariant()
    def every_pin_is_that_of_a_session(self) -> None:
        if hasattr(self, "loop") and self.loop.state.sessions is not None:
            self.loop.state.sessions.check_integrity()


PinningMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPinningMachine = PinningMachine.TestCase
