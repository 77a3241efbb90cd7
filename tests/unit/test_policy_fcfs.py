"""FCFS by example: on views made by hand, and through a loop."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from floodplain.core.errors import UserError
from floodplain.core.plan import Decision
from floodplain.core.request import SeqId
from floodplain.core.view import SequenceView
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.registry import make_policy
from tests.support.driver import Driver
from tests.support.loops import make_loop, make_request
from tests.support.views import NEVER, loading, make_view, prompt, stream, waiting


def row(number: int, **fields: object) -> SequenceView:
    """A stream that has blocks for ever; ``fields`` override it."""
    return stream(number, **({"block_due_step": NEVER} | fields))


def decide(*rows: SequenceView, num_available_blocks: int = 100, **fields: object) -> Decision:
    view = make_view(*rows, tiers=(), num_available_blocks=num_available_blocks, **fields)
    return FcfsPolicy().decide(view, 0.0, Random(0))


def test_an_older_prefill_leaves_younger_decodes_their_tokens() -> None:
    chunking = prompt(0, 90, 10)
    decision = decide(chunking, row(1), row(2), max_batched_tokens=32)
    assert decision.decodes == (1, 2)
    assert [(chunk.seq_id, chunk.num_tokens) for chunk in decision.chunks] == [(0, 30)]
    assert decide(row(0), row(1), row(2), max_batched_tokens=2).decodes == (0, 1)


def test_an_outstanding_victim_is_held_back_not_preempted() -> None:
    running = (row(0, block_due_step=100), row(1), row(2))
    decision = decide(*running, num_available_blocks=0, outstanding=frozenset({SeqId(2)}))
    assert decision.preemptions == ()
    assert decision.decodes == (1,)  # the first waits for its block, the last is held back for it


def test_a_prefix_that_others_hold_costs_no_block_but_a_cached_one_does() -> None:
    cached = waiting(0, 10, num_cached_tokens=8)
    shared = waiting(0, 10, num_cached_tokens=8, num_shared_blocks=2)
    assert decide(cached, num_available_blocks=2).admissions == ()
    assert [c.num_tokens for c in decide(cached, num_available_blocks=3).admissions] == [2]
    assert [c.num_tokens for c in decide(shared, num_available_blocks=1).admissions] == [2]


# -- through a loop --------------------------------------------------------------------------------------------------


def test_a_lower_priority_number_goes_first() -> None:
    driver = Driver(make_loop(max_num_seqs=1))
    for priority in (2, 0, 1):
        request = make_request("r", (priority, 1), max_tokens=1)
        driver.submit_request(replace(request, priority=priority))
    assert [chunk.seq_id for _ in range(3) for chunk in driver.step().prefills] == [1, 2, 0]


def test_ties_break_by_the_order_of_submission() -> None:
    driver = Driver(make_loop(max_num_seqs=1))
    for number in range(4):
        driver.submit_request(make_request(str(number), (number, 1), arrival_s=0.0, max_tokens=1))
    assert [chunk.seq_id for _ in range(4) for chunk in driver.step().prefills] == [0, 1, 2, 3]


def test_policies_have_names() -> None:
    assert isinstance(make_policy("fcfs"), FcfsPolicy)
    with pytest.raises(UserError, match=r"^policy must be one of .*fcfs.*, not 'lifo'"):
        make_policy("lifo")


# -- beside copies ---------------------------------------------------------------------------------------------------


def test_no_request_is_preempted_for_blocks_that_a_copy_will_free() -> None:
    """A prefix is being saved: its blocks are free again in a step or two."""
    running = (row(0, block_due_step=100), row(1), row(2))
    assert decide(*running, num_available_blocks=0, num_draining_blocks=1) == Decision(decodes=(1, 2))
    assert decide(*running, num_available_blocks=0, num_draining_blocks=0).preemptions


def test_no_request_is_preempted_while_a_later_arrival_is_loading() -> None:
    """The later arrival is preempted once it is loaded."""
    running, later = (row(0, block_due_step=100), row(1)), loading(2)
    assert decide(*running, later, num_available_blocks=0) == Decision(decodes=(1,))
    earlier = loading(2, order_key=(0, -1.0, 2))
    assert [one.seq_id for one in decide(*running, earlier, num_available_blocks=0).preemptions] == [1]
