"""When the gate lets FCFS decide, by example."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from floodplain.core.plan import Decision, Reason
from floodplain.core.request import SeqId
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, SequenceView, View
from floodplain.policy.base import SharingPolicy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.growth import count_spare_blocks
from floodplain.policy.ranking import Ranking, live_rows
from floodplain.policy.registry import make_policy
from floodplain.policy.settings import SLICE_STEPS, SharingSettings
from tests.support.views import host, make_view, stream, swapped, waiting

SLICE = 4
MARK = Decision(decodes=(SeqId(42),))
"""The decision of the policy behind the gate."""


class Marked(SharingPolicy):
    """Returns ``MARK``."""

    name = "marked"

    def decide(self, view: View, now: float, rng: Random) -> Decision:
        return MARK

    def rank(self, view: View, now: float) -> Ranking:
        return Ranking(live_rows(view), frozenset(), SLICE)


def ask(*rows: SequenceView, **fields: object) -> Decision:
    settings = SharingSettings(slice_steps=SLICE)
    return GatedPolicy(Marked(settings)).decide(make_view(*rows, **fields), 0.0, Random(0))


def is_open(*rows: SequenceView, **fields: object) -> bool:
    return ask(*rows, **fields) is MARK


def test_it_opens_when_prompts_take_too_long_for_the_policy() -> None:
    class Impatient(Marked):
        def has_long_prompts(self, view: View) -> bool:
            return len(view.waiting) > 1

    gated = GatedPolicy(Impatient(SharingSettings(slice_steps=SLICE)))
    assert gated.decide(make_view(stream(0), waiting(1)), 0.0, Random(0)) is not MARK
    assert gated.decide(make_view(stream(0), waiting(1), waiting(2)), 0.0, Random(0)) is MARK


def test_it_opens_when_a_newcomer_does_not_fit_with_a_slice_of_growth() -> None:
    assert not is_open(stream(0), waiting(1, 8), num_available_blocks=4)  # 12 tokens are 3 blocks, and one to grow
    assert is_open(stream(0), waiting(1, 8), num_available_blocks=3)


def test_it_opens_when_there_are_too_few_places() -> None:
    assert not is_open(stream(0), waiting(1), max_num_seqs=2)
    assert is_open(stream(0), waiting(1), max_num_seqs=1)


@pytest.mark.parametrize("rows", [(stream(0), waiting(1, 8)), (swapped(0),)])
def test_without_swap_space_it_stays_closed(rows: tuple[SequenceView]) -> None:
    assert not is_open(*rows, tiers=(), num_available_blocks=0)


def test_without_swap_space_decisions_give_the_reason_for_no_turns() -> None:
    assert ask(stream(0), waiting(1, 8), tiers=(), num_available_blocks=0).reason is Reason.NO_SWAP
    assert ask(stream(0), tiers=()).reason is None  # all requests fit


@pytest.mark.parametrize("name", SLICE_STEPS)
def test_it_looks_ahead_for_the_policys_own_slice_unless_another_is_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def has_room(view: View, slice_steps: int) -> int:
        asked.append(slice_steps)
        return 0

    monkeypatch.setattr("floodplain.policy.gate.count_spare_blocks", has_room)
    for settings in (None, SharingSettings(slice_steps=5)):
        make_policy(name, settings).decide(make_view(stream(0)), 0.0, Random(0))
    most = SLICE_STEPS["paced"] if name == "timely" else 100  # it begins by sharing the device like paced
    assert asked == [min(SLICE_STEPS[name], most), min(5, most)]


def test_many_blocks_are_quickly_enough() -> None:
    rows = [stream(number) for number in range(20)]
    assert count_spare_blocks(make_view(*rows, num_available_blocks=40), SLICE) == 0


# -- a slow link: a block of 4 tokens is computed in 4 ms --------------------------------------------------------------

PRICES = Prices(step_s=0.01, prefill_token_s=0.001)


def decide(*rows: SequenceView, block_s: float, **fields: object) -> Decision:
    view = make_view(*rows, tiers=(host(block_s=block_s),), prices=PRICES, **fields)
    return GatedPolicy(Marked(SharingSettings(slice_steps=SLICE))).decide(view, 0.0, Random(0))


@pytest.mark.parametrize(("block_s", "takes_turns"), [(0.0019, True), (0.0021, False)])
def test_turns_begin_where_a_copy_is_twice_as_quick_as_computing(block_s: float, takes_turns: bool) -> None:
    decision = decide(stream(0), waiting(1, 8), num_available_blocks=0, block_s=block_s)
    assert (decision is MARK) == takes_turns
    assert decision.reason is (None if takes_turns else Reason.SWAP_SLOW)


@pytest.mark.parametrize(("block_s", "takes_turns"), [(0.0039, True), (0.0041, False)])
def test_turns_end_where_swapping_is_no_quicker(block_s: float, takes_turns: bool) -> None:
    decision = decide(stream(0), swapped(1), num_available_blocks=0, block_s=block_s)
    assert (decision is MARK) == takes_turns


def test_one_quick_tier_is_enough() -> None:
    tiers = (host(block_s=1.0), host(block_s=1e-6))
    assert is_open(stream(0), waiting(1, 8), num_available_blocks=0, tiers=tiers, prices=PRICES)


def test_where_only_a_slow_tier_has_room_turns_do_not_begin() -> None:
    """AQUA, end of section 7: first come, first served when only DRAM is left."""
    full_peer, slow_host = host(tier=Tier.PEER, num_free_slots=0), host(block_s=1.0)
    short = {"num_available_blocks": 0, "prices": PRICES}
    gated = GatedPolicy(Marked(SharingSettings(slice_steps=SLICE)))
    view = make_view(stream(0), waiting(1, 8), tiers=(full_peer, slow_host), **short)
    fcfs = replace(FcfsPolicy().decide(view, 0.0, Random(0)), reason=Reason.SWAP_SLOW)
    assert gated.decide(view, 0.0, Random(0)) == fcfs
    for tiers in [(host(tier=Tier.PEER, num_free_slots=1), slow_host), (full_peer, host()), (host(num_free_slots=0),)]:
        assert is_open(stream(0), waiting(1, 8), tiers=tiers, **short)


def test_over_a_slow_link_swapped_requests_resume_by_arrival() -> None:
    rows = [stream(2), swapped(1), swapped(0), waiting(3)]
    decision = decide(*rows, num_available_blocks=5, block_s=1.0)
    assert [order.seq_id for order in decision.resumptions] == [0]  # four blocks, and one for the stream
    assert not decision.preemptions
    assert decision.decodes == (2,)
    assert decision.reason is Reason.SWAP_SLOW
