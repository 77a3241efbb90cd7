"""AQUA's rule by example: what counts as served, and when a request may be preempted."""

from __future__ import annotations

from random import Random

from floodplain.core.plan import Decision, PreemptionMode, Reason
from floodplain.core.view import Prices, SequenceView
from floodplain.policy.cfs import CfsPolicy, prefilled_tokens, service
from floodplain.policy.ranking import tokens_of_requests
from floodplain.policy.settings import SharingSettings
from tests.support.views import host, loading, make_view, prompt, stream, swapped, waiting


def decide(
    *rows: SequenceView,
    step: int = 100,
    is_synchronous: bool = False,
    **fields: object,
) -> Decision:
    view = make_view(*rows, step=step, **fields)
    settings = SharingSettings(slice_steps=4, is_synchronous=is_synchronous)
    return CfsPolicy(settings).decide(view, 0.0, Random(0))


def served(row: SequenceView, step: int) -> tuple[bool, int]:
    return service(row, step, tokens_of_requests(make_view(row, step=step), 4)[row.seq_id])


def order(*rows: SequenceView) -> list[int]:
    return [row.seq_id for row in CfsPolicy(SharingSettings()).rank(make_view(*rows), 0.0).rows]


def left(decision: Decision) -> set[int]:
    return {order.seq_id for order in decision.preemptions}


def came(decision: Decision) -> set[int]:
    return {order.seq_id for order in (*decision.resumptions, *decision.admissions)}


def test_served_work_is_tokens_generated_or_computed_of_a_prompt() -> None:
    assert served(stream(0), 100) == (True, 4)
    assert served(stream(0), 103) == (True, 7)
    assert served(prompt(0, 30, 8), 100) == (False, 8)
    assert served(waiting(0), 100) == (False, 0)


def test_a_prompt_in_swap_space_keeps_what_it_has() -> None:
    half = swapped(0, num_prompt=30, num_tokens=30, num_restorable_tokens=20)
    assert prefilled_tokens(half, 100) == 20


def test_a_cached_prefix_does_not_count_as_work_of_a_newcomer() -> None:
    assert served(waiting(0, 30, num_cached_tokens=20, num_restorable_tokens=24), 100) == (False, 0)


def test_computing_again_is_no_gift() -> None:
    again = prompt(0, 12, 4, num_prompt=8)  # four tokens generated, preempted, a third computed again
    assert served(again, 100) == (True, 4)


def test_the_least_served_go_first_and_then_the_earliest() -> None:
    assert order(stream(0, num_tokens=20), stream(1), waiting(2), waiting(3), prompt(4, 30, 8)) == [2, 3, 4, 1, 0]


FULL = {"num_blocks": 9, "num_available_blocks": 0}


def resident(number: int, num_tokens: int, **fields: object) -> SequenceView:
    """With room in its blocks for a slice: it needs none, and preempting it frees three."""
    return stream(number, num_tokens=num_tokens, block_due_step=200, **fields)


RESIDENTS = (resident(0, 15), resident(1, 13), resident(2, 14))


def test_when_a_slice_ends_the_least_served_replaces_the_most_served() -> None:
    decision = decide(*RESIDENTS, swapped(3), **FULL)
    assert left(decision) == {0, 2}  # twelve tokens and a slice are four blocks, and each victim frees three
    assert {(one.mode, one.reason) for one in decision.preemptions} == {(PreemptionMode.SWAP, Reason.SLICE_ENDED)}


def test_room_is_made_at_once_for_all_that_are_to_be_admitted() -> None:
    """Although no block is free before the victims' tails are copied."""
    decision = decide(*RESIDENTS, swapped(3), swapped(4, num_tokens=9), **FULL)
    assert left(decision) == {0, 1, 2}  # nine tokens and a slice are four blocks, twelve too; the pool has nine
    assert came(decision) == set()


def test_room_that_is_kept_is_not_given_to_others() -> None:
    """3 takes three of five blocks. 4 needs three, too; one is draining: 5 must not get the other two."""
    small = swapped(5, num_prompt=2, num_tokens=4)
    rows = [resident(0, 13), swapped(3, num_tokens=8), swapped(4, num_tokens=8), small]
    room = {"step": 101, "num_blocks": 20}
    assert came(decide(*rows, num_available_blocks=5, num_draining_blocks=1, **room)) == {3}
    assert came(decide(*rows, num_available_blocks=6, **room)) == {3, 4}
    assert came(decide(*rows[:2], small, num_available_blocks=5, num_draining_blocks=1, **room)) == {3, 5}


def test_at_a_synchronous_switch_nothing_is_computed_beside_the_copies() -> None:
    """As in AQUA: neither when copies begin nor while they run; a newcomer's first chunk waits, too."""
    room = {"num_blocks": 12, "num_available_blocks": 3, "is_synchronous": True}
    began = decide(*RESIDENTS, waiting(3, 4), swapped(4), **room)
    assert left(began)
    assert not (began.decodes or began.chunks or began.admissions or began.backups)
    assert decide(stream(0), loading(4), **room) == Decision()
    assert decide(stream(0), swapped(4, is_leaving=True), **room) == Decision()
    assert decide(*RESIDENTS, step=101, **room).decodes == (0, 1, 2)


def test_over_a_varying_link_ends_of_long_slices_are_ends_of_short_ones() -> None:
    """Slices of 4; the copies of 9 blocks take 5.3 steps of 20 ms, then 10.6: slices of 8, then of 16."""
    for block_s, ends_at in ((0.01, [104, 112]), (0.02, [112])):
        slow = {"tiers": (host(block_s=block_s),), "prices": Prices(step_s=0.02, prefill_token_s=0.02)}
        turns = [step for step in range(100, 116) if left(decide(*RESIDENTS, swapped(3), step=step, **slow, **FULL))]
        assert turns == ends_at


def test_a_completion_ends_the_slice() -> None:
    def ends(step: int) -> bool:
        return bool(decide(*RESIDENTS, swapped(3), step=101, completion_step=step, **FULL).preemptions)

    assert ends(101)
    assert not ends(100)


def test_between_the_ends_of_slices_requests_that_fit_are_admitted() -> None:
    assert came(decide(*RESIDENTS, swapped(3), waiting(4), step=101, num_blocks=20, num_available_blocks=11)) == {3, 4}


def test_no_request_is_preempted_for_one_that_was_served_more() -> None:
    assert decide(*RESIDENTS, swapped(3, num_tokens=40), **FULL).preemptions == ()


def test_a_request_that_entered_in_this_step_stays() -> None:
    """Otherwise requests would be swapped forever, and none would run."""
    rows = [resident(row.seq_id, row.num_tokens, entered_step=100) for row in RESIDENTS]
    assert decide(*rows, waiting(3), **FULL).preemptions == ()
    rows = [resident(row.seq_id, row.num_tokens, entered_step=99) for row in RESIDENTS]
    assert left(decide(*rows, waiting(3), **FULL)) == {0}  # three blocks for 8 tokens and a slice


def test_no_request_is_preempted_for_one_that_cannot_begin() -> None:
    """If streams take all tokens of the step, a newcomer would get blocks and no token."""
    assert left(decide(*RESIDENTS, waiting(3), max_batched_tokens=4, **FULL)) == {0}
    assert left(decide(*RESIDENTS, waiting(3), max_batched_tokens=3, **FULL)) == set()


def test_a_request_to_be_recomputed_stays_until_it_has_a_new_token() -> None:
    """Otherwise a turn that ends within a prompt is wasted, and two of them could alternate forever."""
    residents = [prompt(number, 8, 4, num_blocks=3, exclusive_blocks=3) for number in range(3)]
    slow = {"tiers": (host(block_s=9.0),), "prices": Prices(1e9, 0.1)}
    assert left(decide(*residents, waiting(3, 4), **FULL)) == {2}
    assert left(decide(*residents, waiting(3, 4), tiers=(), **FULL)) == set()
    assert left(decide(*residents, waiting(3, 4), **slow, **FULL)) == set()
    assert left(decide(*RESIDENTS, waiting(3, 4), tiers=(), **FULL)) == {0}
