"""When a prefix is fetched from swap space, and when one is saved there, by example."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from floodplain.core.hashing import BlockKey
from floodplain.core.plan import Chunk, Decision, PrefixBackupOrder, Reason, Resumption
from floodplain.core.request import SeqId
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices, SequenceView
from floodplain.policy.base import Standing
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.prefixes import pays_to_fetch, prefix_backup
from floodplain.policy.registry import make_policy
from tests.support.views import host, make_view, stream, swapped, waiting

PRICES = Prices(step_s=0.04, prefill_token_s=0.001)


def knows(number: int, num_tokens: int = 30, **fields: object) -> SequenceView:
    """A new request with six blocks of 4 tokens in swap space."""
    return waiting(number, num_tokens, **({"num_backed_blocks": 6, "num_restorable_tokens": 24} | fields))


@pytest.mark.parametrize(
    ("block_s", "latency_s", "num_inbound", "pays"),
    [(0.001, 0.0, 0, True), (0.005, 0.0, 0, False), (0.001, 0.02, 0, False), (0.001, 0.0, 20, False)],
)
def test_a_prefix_is_fetched_if_that_is_sooner_than_computing_it(
    block_s: float, latency_s: float, num_inbound: int, pays: bool
) -> None:
    tier = host(block_s=block_s, latency_s=latency_s, num_inbound_blocks=num_inbound)
    view = make_view(knows(0), tiers=(tier,), prices=PRICES)  # 24 tokens take 24 ms to compute
    assert pays_to_fetch(view, view.waiting[0]) is pays


def test_blocks_loading_for_another_request_are_not_counted_twice() -> None:
    """Six blocks of 3 ms, loading for another request, take less than 24 ms of computing; twelve take more."""
    view = make_view(knows(0), tiers=(host(block_s=0.003, num_inbound_blocks=6),), prices=PRICES)
    assert pays_to_fetch(view, knows(0, is_arriving=True))
    assert not pays_to_fetch(view, knows(0))


def test_what_is_on_the_device_already_is_not_worth_a_copy() -> None:
    tier = host(block_s=0.001)
    row = knows(0, num_cached_tokens=20, num_backed_blocks=1)
    assert pays_to_fetch(make_view(row, tiers=(tier,), prices=PRICES), row)
    assert not pays_to_fetch(make_view(row, tiers=(host(block_s=0.005),), prices=PRICES), row)
    nothing = waiting(0, 30, num_cached_tokens=24, num_restorable_tokens=24)
    assert not pays_to_fetch(make_view(nothing, tiers=(tier,)), nothing)


def test_without_swap_space_no_prefix_is_fetched() -> None:
    assert not pays_to_fetch(make_view(knows(0), tiers=()), knows(0))


@pytest.mark.parametrize("name", ["fcfs", "cfs", "fair", "paced"])
@pytest.mark.parametrize("others", [(), (swapped(5),)])
def test_every_policy_fetches_and_lets_the_others_start(name: str, others: tuple[SequenceView, ...]) -> None:
    """With the gate closed and open: it is open while a request is swapped out."""
    view = make_view(knows(0), waiting(1, 8), *others, prices=PRICES)
    decision = make_policy(name).decide(view, 1.0, Random(0))
    assert Resumption(SeqId(0), Reason.PREFIX_IN_SWAP) in decision.resumptions
    assert decision.admissions == (Chunk(SeqId(1), 8),)


KEY = BlockKey(b"what comes first")


@pytest.mark.parametrize("name", ["fcfs", "cfs", "fair", "paced"])
@pytest.mark.parametrize("others", [(), (swapped(5),)])
def test_every_policy_fetches_what_several_need_once(name: str, others: tuple[SequenceView, ...]) -> None:
    def coming(*rows: SequenceView) -> list[int]:
        decision = make_policy(name).decide(make_view(*rows, *others, prices=PRICES), 1.0, Random(0))
        assert not decision.admissions
        return [order.seq_id for order in decision.resumptions if order.reason is Reason.PREFIX_IN_SWAP]

    assert coming(knows(0, next_copy=KEY), knows(1, next_copy=KEY)) == [0]
    assert coming(knows(0, next_copy=KEY), knows(1, next_copy=BlockKey(b"another"))) == [0, 1]
    assert coming(knows(0, next_copy=KEY, is_arriving=True)) == []


def test_fcfs_keeps_room_for_requests_that_wait_for_anothers_copy() -> None:
    rows = knows(0, next_copy=KEY, is_arriving=True), waiting(1, 8)
    for num_free, admitted in [(8, (Chunk(SeqId(1), 8),)), (7, ())]:
        view = make_view(*rows, num_available_blocks=num_free)
        assert FcfsPolicy().decide(view, 0.0, Random(0)).admissions == admitted


def test_fcfs_lets_no_request_pass_a_fetch_that_finds_no_room() -> None:
    view = make_view(knows(0), waiting(1, 8), num_available_blocks=5)
    decision = FcfsPolicy().decide(view, 0.0, Random(0))
    assert not decision.resumptions
    assert not decision.admissions


def test_fcfs_asks_again_about_a_prompt_that_fits_and_waits_for_a_copy() -> None:
    """Prices change while a copy is under way: what was not worth computing when it began may be later."""
    rows = stream(0), knows(1, next_copy=KEY, is_arriving=True)
    tiers = (host(block_s=0.001, num_inbound_blocks=6),)
    slow = make_view(*rows, tiers=tiers, prices=PRICES)  # 6 ms for the copy, or 24 to compute, or 2.4
    fast = make_view(*rows, tiers=tiers, prices=replace(PRICES, prefill_token_s=PRICES.prefill_token_s / 10))
    waits, starts = (FcfsPolicy().decide(view, 0.0, Random(0)) for view in (slow, fast))
    assert (waits.resumptions, waits.admissions) == ((), ())
    assert starts.admissions == (Chunk(SeqId(1), 30),)
    assert FcfsPolicy().stands(slow) is None
    for fields in ({"num_available_blocks": 7}, {"max_num_seqs": 1}):
        stands = FcfsPolicy().stands(make_view(*rows, tiers=tiers, prices=PRICES, **fields))
        assert stands == Standing(num_at_risk=0)


# -- saving ----------------------------------------------------------------------------------------------------------

FULL = {"num_available_blocks": 40, "num_empty_blocks": 3, "prices": Prices(step_s=0.010), "max_batched_tokens": 64}
DECODE = Decision(decodes=(SeqId(0),))


@pytest.mark.parametrize(
    ("fields", "num_spare"),
    [
        ({"tiers": ()}, 100),  # nowhere to go
        ({"tiers": (host(num_outbound_blocks=1),)}, 100),  # the link is busy
        ({"tiers": (host(num_free_slots=0),)}, 100),
        ({"tiers": (host(block_s=0.011),)}, 100),  # no block would be there before the step ends
        ({"tiers": (host(latency_s=0.02),)}, 100),
        ({"num_empty_blocks": 16}, 100),  # the next step evicts nothing
        ({"num_available_blocks": 3}, 100),  # nothing is cached
        ({}, 1),  # blocks that a request may need are not held up
    ],
)
def test_nothing_is_saved_that_need_not_or_must_not_be(fields: dict[str, object], num_spare: int) -> None:
    assert prefix_backup(make_view(**(FULL | fields)), DECODE, num_spare) is None


def test_a_save_is_limited_by_the_link_the_slots_and_half_of_the_spare() -> None:
    for tier, num_spare, num_at_risk, expected in [
        (host(block_s=0.002), 100, 16, 5),
        (host(num_free_slots=7), 100, 7, 7),  # more would evict what was just saved
        (host(), 20, 16, 10),
    ]:
        assert prefix_backup(make_view(**(FULL | {"tiers": (tier,)})), DECODE, num_spare) == PrefixBackupOrder(
            num_at_risk, expected, Tier.HOST
        )


def test_a_step_that_only_computes_prompts_has_time_for_copies_too() -> None:
    """If all requests generate one token, no step decodes, so the price of decodes is never learned."""
    fields = FULL | {"prices": Prices(prefill_token_s=0.001), "tiers": (host(block_s=0.002),)}

    def num_saved(step: Decision) -> int:
        order = prefix_backup(make_view(**fields), step, 100)
        return order.num_blocks if order else 0

    chunk = Chunk(SeqId(0), 10)
    assert num_saved(Decision(chunks=(chunk,))) == num_saved(Decision(admissions=(chunk,))) == 5
    assert num_saved(DECODE) == num_saved(Decision()) == 0


def test_only_the_closed_gate_saves() -> None:
    rows = [stream(number) for number in range(12)]
    calm = make_view(*rows, **(FULL | {"num_available_blocks": 40}))
    crowded = make_view(*rows, waiting(20, 60), **(FULL | {"num_available_blocks": 8}))
    decide = make_policy("paced").decide
    assert decide(calm, 0.0, Random(0)).prefix_backup is not None
    assert decide(crowded, 0.0, Random(0)).prefix_backup is None


def test_fcfs_saves_too_while_no_request_waits_for_the_blocks() -> None:
    def saved(*rows: SequenceView, num_available: int = 40) -> PrefixBackupOrder | None:
        view = make_view(*rows, **(FULL | {"num_available_blocks": num_available}))
        return make_policy("fcfs").decide(view, 0.0, Random(0)).prefix_backup

    residents = [stream(number) for number in range(12)]
    assert saved(*residents) == PrefixBackupOrder(16, 14, Tier.HOST)  # half of 40 less one for each
    assert saved(*residents, waiting(20, 8)) == PrefixBackupOrder(16, 12, Tier.HOST)  # three go to it
    assert saved(*residents, waiting(20, 200)) is None  # all are for it, though its first chunk is smaller
    assert saved(*residents, waiting(20, 8), num_available=1) is None
    assert FcfsPolicy().decide(make_view(*residents, **FULL), 0.0, Random(0)).prefix_backup is None
