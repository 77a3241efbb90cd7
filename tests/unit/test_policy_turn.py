"""How a ranking is fitted into memory, by example; the ranking is that of ``fair``."""

from __future__ import annotations

from random import Random

from floodplain.core.plan import Decision
from floodplain.core.view import SequenceView
from floodplain.policy.fair import FairPolicy
from floodplain.policy.settings import SharingSettings
from tests.support.views import loading, make_view, prompt, stream, swapped, waiting


def decide(*rows: SequenceView, **fields: object) -> Decision:
    return FairPolicy(SharingSettings(slice_steps=4)).decide(make_view(*rows, **fields), 0.0, Random(0))


def came(decision: Decision) -> list[int]:
    return [order.seq_id for order in (*decision.resumptions, *decision.admissions)]


def left(decision: Decision) -> list[int]:
    return [order.seq_id for order in decision.preemptions]


def test_who_comes_must_have_room_for_a_slice() -> None:
    assert came(decide(waiting(5, 8), num_available_blocks=3)) == [5]
    assert came(decide(waiting(5, 8), num_available_blocks=2)) == []


def test_what_those_on_their_way_in_still_need_is_not_given_to_others() -> None:
    """30 tokens and a slice are nine blocks, of which it has three."""
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=9)) == [5]
    assert came(decide(loading(0, num_tokens=30), waiting(5, 8), num_available_blocks=8)) == []


def test_nor_what_residents_will_need() -> None:
    resident = stream(0, block_due_step=103, entered_step=99)
    assert came(decide(resident, waiting(5, 8), num_available_blocks=4)) == [5]
    assert came(decide(resident, waiting(5, 8), num_available_blocks=3)) == []


def test_nobody_leaves_for_a_resident_if_that_is_not_enough() -> None:
    """A chunk of eight blocks, and two victims of three that were about to need one more each: six, and not eight."""
    victims = [stream(number, block_due_step=101) for number in (1, 2)]
    short = decide(prompt(0, 40, 8), *victims, num_available_blocks=0)
    assert left(short) == [0]  # nor can it stay: nothing would ever be free for it
    assert left(decide(prompt(0, 32, 8), *victims, num_available_blocks=0)) == [2, 1]


def test_without_a_refill_room_is_made_for_one_after_the_other() -> None:
    """So that copies spread out; the second one's victim goes on computing until its turn comes."""
    residents = [stream(number, block_due_step=200, num_tokens=20) for number in (0, 1)]
    decision = decide(*residents, swapped(2, num_tokens=9), swapped(3, num_tokens=9), num_available_blocks=1)
    assert left(decision) == [1]
    assert came(decision) == []
    assert decision.decodes == (0,)
