"""How a ranking is fitted into memory, by example; the ranking is that of ``fair``."""

from __future__ import annotations

from random import Random

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Decision, Reason
from floodplain.core.view import SequenceView
from floodplain.policy.fair import FairPolicy
from floodplain.policy.settings import SharingSettings
from tests.support.views import host, loading, make_view, prompt, stream, swapped, waiting


def decide(*rows: SequenceView, **fields: object) -> Decision:
    return FairPolicy(SharingSettings(slice_steps=4)).decide(make_view(*rows, **fields), 0.0, Random(0))


def came(decision: Decision) -> list[int]:
    return [order.seq_id for order in (*decision.resumptions, *decision.admissions)]


def left(decision: Decision) -> list[int]:
    return [order.seq_id for order in decision.preemptions]


def test_an_admitted_request_must_have_room_for_a_slice() -> None:
    assert came(decide(waiting(5, 8), num_available_blocks=3)) == [5]
    assert came(decide(waiting(5, 8), num_available_blocks=2)) == []


def test_blocks_that_loading_requests_still_need_are_kept_for_them() -> None:
    """30 tokens and a slice are nine blocks, of which it has three."""
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=9)) == [5]
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=8)) == []


def test_nor_what_residents_will_need() -> None:
    resident = stream(0, block_due_step=103, entered_step=99)
    assert came(decide(resident, waiting(5, 8), num_available_blocks=4)) == [5]
    assert came(decide(resident, waiting(5, 8), num_available_blocks=3)) == []


def test_no_victim_is_chosen_for_a_resident_if_that_is_not_enough() -> None:
    """The chunk needs eight blocks, two victims free three each: the blocks that they would need do not count."""
    victims = [stream(number, block_due_step=101) for number in (1, 2)]
    short = decide(prompt(0, 40, 8), *victims, num_available_blocks=0)
    assert left(short) == [0]  # it cannot stay: no block would ever be free for it
    assert left(decide(prompt(0, 32, 8), *victims, num_available_blocks=0)) == [2, 1]


def test_without_a_refill_room_is_made_for_one_after_the_other() -> None:
    """Copies spread out; the second request's victim computes until then."""
    residents = [stream(number, block_due_step=200, num_tokens=20) for number in (0, 1)]
    decision = decide(*residents, swapped(2, num_tokens=9), swapped(3, num_tokens=9), num_available_blocks=1)
    assert left(decision) == [1]
    assert came(decision) == []
    assert decision.decodes == (0,)


def test_a_prefix_that_two_swapped_requests_share_is_swapped_in_once() -> None:
    """The second request resumes when the blocks are loaded, and shares them: it needs less room."""
    key, other = BlockKey(b"shared"), BlockKey(b"not")
    assert came(decide(swapped(0, next_copy=key), swapped(1, next_copy=key), swapped(2, next_copy=other))) == [0, 2]
    assert came(decide(swapped(0, next_copy=key, is_arriving=True), swapped(2, next_copy=other))) == [2]


def test_room_is_kept_for_a_request_that_waits_for_anothers_copy() -> None:
    """Four blocks for it, and three for the request below."""
    rows = swapped(0, next_copy=BlockKey(b"shared"), is_arriving=True), waiting(5, 8, credit=9.0)
    assert came(decide(*rows, num_available_blocks=7)) == [5]
    assert came(decide(*rows, num_available_blocks=6)) == []


# -- slots -----------------------------------------------------------------------------------------------------------

VETERAN = stream(
    1, num_tokens=48, num_scheduled=47, num_blocks=12, exclusive_blocks=12, num_backed_blocks=11, credit=1e2
)
RETURNING = waiting(2, 30, num_backed_blocks=6, num_restorable_tokens=24, credit=5.0)


def with_slots(num_free: int, *rows: SequenceView, num_blocks: int = 3) -> Decision:
    return decide(*rows, num_available_blocks=num_blocks, tiers=(host(num_free_slots=num_free),))


def test_a_prefix_is_not_fetched_from_slots_that_a_victim_needs() -> None:
    """Six slots hold the idle prefix of a waiting request; the veteran's tail needs one of them."""
    decision = with_slots(6, VETERAN, swapped(0), RETURNING)
    assert left(decision) == [1]
    assert [order.seq_id for order in decision.resumptions] == [0]
    assert [chunk.seq_id for chunk in decision.admissions] == [2]  # it computes its prompt instead
    enough = with_slots(7, VETERAN, swapped(0), RETURNING)
    assert [order.seq_id for order in enough.resumptions] == [0, 2]


def test_newcomers_wait_for_slots_while_those_in_swap_space_take_turns() -> None:
    """The veteran cannot be swapped out for the newcomer; the swapped request has room without that."""
    large, small = waiting(3, 20, credit=0.0), swapped(4, num_tokens=5, num_backed_blocks=2, credit=50.0)
    decision = with_slots(0, VETERAN, large, waiting(5, 4, credit=1.0), small, num_blocks=4)
    assert (left(decision), came(decision)) == ([], [4])
    assert decision.reason is Reason.SWAP_FULL
    assert sorted(came(with_slots(1, VETERAN, large, small, num_blocks=4))) == [3, 4]


def test_swapped_requests_wait_in_their_order() -> None:
    assert came(with_slots(0, VETERAN, swapped(3), swapped(4, num_tokens=5, num_backed_blocks=2, credit=50.0))) == []
