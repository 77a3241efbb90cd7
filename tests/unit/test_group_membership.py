"""Blocks that are reserved for a returning request are adopted or freed, even if its stream never ran."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from floodplain.cluster.groups.membership import Membership
from floodplain.core.blocks import BlockLedger
from floodplain.core.request import SeqId

REQUEST, NUM_LOADED = 7, 3


def membership_with_engine() -> tuple[Membership, Any]:
    """A membership over an engine that is only a ledger; functions posted to it run at once."""
    state = SimpleNamespace(ledger=BlockLedger(16, 16), sequences={})
    engine: Any = SimpleNamespace(loop=SimpleNamespace(state=state), clock=lambda: 0.0)

    def post(function: Callable[[Any], object]) -> None:
        function(engine)

    member: Any = SimpleNamespace(engine=SimpleNamespace(post=post))
    return Membership(member, number=1), engine


def test_blocks_of_a_stream_that_never_ran_are_freed() -> None:
    membership, engine = membership_with_engine()
    ledger = engine.loop.state.ledger
    assert membership._begin_load(REQUEST, NUM_LOADED, engine) is not None and ledger.num_available == 16 - NUM_LOADED
    membership.adopter(REQUEST, 40)  # the order arrived; its stream was cancelled before it submitted anything
    membership.release(REQUEST)
    assert ledger.num_available == 16
    membership.release(REQUEST)  # a second release changes nothing
    assert ledger.num_available == 16


def test_release_after_adoption_changes_nothing() -> None:
    membership, engine = membership_with_engine()
    ledger = engine.loop.state.ledger
    membership._begin_load(REQUEST, NUM_LOADED, engine)
    membership.adopter(REQUEST, 40)(engine, SeqId(1))  # the sequence has ended: its blocks are freed
    assert ledger.num_available == 16
    other = ledger.begin_load(16)
    membership.release(REQUEST)
    assert other is not None and ledger.num_available == 0
