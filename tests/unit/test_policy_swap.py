"""The tier of a victim's KV, and blocks written behind: prices and slots, one decision at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.core.plan import BackupOrder, Decision, Preemption, PreemptionMode, Reason, Resumption
from floodplain.core.request import SeqId
from floodplain.core.tiers import Tier
from floodplain.core.view import Prices
from floodplain.policy.swap import SLOTS_FOR_TURNS, SwapBudget, num_computed, quick_tiers
from tests.support.driver import Driver, ScriptedPolicy, computed
from tests.support.loops import make_loop
from tests.support.views import host, make_view, prompt, stream

PRICES = Prices(step_s=0.02, prefill_token_s=0.001)
VICTIM = stream(1, num_backed_blocks=2)  # 11 tokens with KV, in three blocks of which two are backed up
BY_COPY = Preemption(SeqId(1), PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
BY_COMPUTING = Preemption(SeqId(1), PreemptionMode.RECOMPUTE, Reason.SLICE_ENDED)


def budget(*tiers: object, prices: Prices = PRICES) -> SwapBudget:
    return SwapBudget(make_view(VICTIM, tiers=tiers, prices=prices))


def test_kv_of_a_stream_counts_the_steps_since_its_row_was_made() -> None:
    assert num_computed(make_view(step=104), stream(0)) == 15
    assert num_computed(make_view(step=104), prompt(0, num_scheduled=8)) == 8


def test_only_what_has_no_backup_is_copied() -> None:
    swap = budget(host(num_free_slots=1))
    assert swap.preempt(VICTIM, Reason.SLICE_ENDED) == (BY_COPY, 1)
    assert swap.reason is None


def test_when_computing_again_is_cheaper_nothing_is_copied() -> None:
    """Eleven tokens cost 11 ms; three blocks back cost as much from 3.67 ms a block on."""
    assert budget(host(block_s=0.0036)).preempt(VICTIM, Reason.SLICE_ENDED) == (BY_COPY, 1)
    swap = budget(host(block_s=0.0037))
    assert swap.preempt(VICTIM, Reason.SLICE_ENDED) == (BY_COMPUTING, 0)
    assert swap.reason is Reason.SWAP_SLOW


def test_kv_that_cannot_be_restored_is_not_copied_whatever_that_costs() -> None:
    row = replace(VICTIM, loses_kv=True)
    swap = budget(host(block_s=0.0), prices=Prices())
    assert swap.loses_kv(row) and not swap.write_behind([row])
    assert swap.preempt(row, Reason.SLICE_ENDED) == (BY_COMPUTING, 0)


def test_a_tier_is_quick_if_a_mean_residents_copy_is_with_its_latency() -> None:
    """Three blocks each: 4 ms a block by computing, so the latency may be 12 ms."""
    rows = [stream(number) for number in range(4)]
    for latency_s, is_quick in ((0.0119, True), (0.0121, False)):
        view = make_view(*rows, tiers=(host(block_s=0.0, latency_s=latency_s),), prices=PRICES)
        assert bool(quick_tiers(view)) is is_quick


def test_while_prices_are_unknown_everything_is_copied() -> None:
    assert budget(host(block_s=99.0), prices=Prices()).preempt(VICTIM, Reason.SLICE_ENDED)[0] == BY_COPY


def test_when_swap_space_is_full_it_is_computed_again() -> None:
    swap = budget(host(num_free_slots=0))
    assert swap.preempt(VICTIM, Reason.SLICE_ENDED) == (BY_COMPUTING, 0)
    assert swap.reason is Reason.SWAP_FULL


def test_slots_are_spent_once() -> None:
    swap = budget(host(num_free_slots=5))
    modes = [swap.preempt(stream(number), Reason.SLICE_ENDED)[0].mode for number in range(3)]  # three blocks each
    assert modes == [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE, PreemptionMode.RECOMPUTE]


def test_the_next_tier_takes_what_the_first_cannot() -> None:
    peer = host(tier=Tier.PEER, num_free_slots=0)
    order, num_copied = budget(peer, host(num_free_slots=9)).preempt(VICTIM, Reason.SLICE_ENDED)
    assert (order.tier, num_copied) == (Tier.HOST, 1)


def test_a_turn_may_end_only_if_it_costs_no_prompt() -> None:
    assert budget(host(num_free_slots=3)).can_keep(VICTIM, 3)
    assert not budget(host(num_free_slots=2)).can_keep(VICTIM, 3)


def test_or_where_computing_is_the_cheaper_way_or_the_only_one() -> None:
    assert budget(host(num_free_slots=0, block_s=1.0)).can_keep(VICTIM, 3)
    assert budget().can_keep(VICTIM, 3)
    assert budget().loses_kv(VICTIM)
    assert budget(host(block_s=1.0)).loses_kv(VICTIM)
    assert not budget(host(num_free_slots=0)).loses_kv(VICTIM)


def test_no_turn_ends_for_a_tier_that_is_slower_than_recomputation() -> None:
    full_peer = host(tier=Tier.PEER, num_free_slots=2)
    assert not budget(full_peer, host(block_s=1.0)).can_keep(VICTIM, 3)
    assert budget(full_peer, host()).can_keep(VICTIM, 3)
    assert not budget(host(tier=Tier.PEER, block_s=1.0), host()).loses_kv(VICTIM)


# -- written behind --------------------------------------------------------------------------------------------------


def behind(*victims: object, **fields: object) -> list[tuple[int, int]]:
    """(sequence, blocks) of the orders."""
    prices = fields.pop("prices", Prices())
    swap = SwapBudget(make_view(*victims, tiers=(host(**fields),), prices=prices))  # type: ignore[arg-type]
    orders = swap.write_behind(victims)  # type: ignore[arg-type]
    assert all(isinstance(order, BackupOrder) and order.tier is Tier.HOST for order in orders)
    return [(order.seq_id, order.num_blocks) for order in orders]


def test_full_blocks_are_written_the_likeliest_victim_first() -> None:
    assert behind(stream(7), stream(3), stream(5)) == [(7, 2), (3, 2), (5, 2)]


def test_neither_the_open_block_nor_what_is_backed_up() -> None:
    assert behind(stream(0, num_backed_blocks=1), stream(1, num_backed_blocks=2), stream(2, num_scheduled=12)) == [
        (0, 1),
        (2, 3),
    ]


def test_write_behind_leaves_slots_for_swap_outs() -> None:
    assert SLOTS_FOR_TURNS == 0.25
    assert behind(stream(0), stream(1), num_slots=40, num_free_slots=13) == [(0, 2), (1, 1)]
    assert behind(stream(0), num_slots=40, num_free_slots=10) == []


def test_no_more_than_the_link_carries_within_a_step() -> None:
    link = {"prices": Prices(step_s=0.02), "block_s": 0.005}  # four blocks
    assert behind(stream(0), stream(1), stream(2), **link) == [(0, 2), (1, 2)]
    assert behind(stream(0), stream(1), num_outbound_blocks=3, **link) == [(0, 1)]
    assert behind(stream(0), num_outbound_blocks=4, **link) == []


def test_requests_that_would_be_recomputed_are_not_written_behind() -> None:
    """Eleven tokens cost 11 ms; three blocks back cost more with 10 ms of latency."""
    slow = {"prices": Prices(step_s=0.02, prefill_token_s=0.001), "latency_s": 0.01, "block_s": 0.001}
    assert behind(stream(0), stream(1, num_tokens=41, num_scheduled=40), **slow) == [(1, 10)]


def test_a_link_that_is_slower_than_a_step_still_gets_one_block_at_a_time() -> None:
    link = {"prices": Prices(step_s=0.02), "block_s": 0.5}
    assert behind(stream(0), **link) == [(0, 1)]
    assert behind(stream(0), num_outbound_blocks=1, **link) == []


def test_swap_outs_of_this_step_take_slots_before_write_behind() -> None:
    swap = SwapBudget(make_view(tiers=(host(num_slots=16, num_free_slots=8),)))
    swap.preempt(stream(0), Reason.SLICE_ENDED)  # three slots; four stay free, so one is left
    assert [order.num_blocks for order in swap.write_behind([stream(1)])] == [1]


def test_swap_outs_of_this_step_use_the_link_before_write_behind() -> None:
    swap = SwapBudget(make_view(tiers=(host(block_s=0.005),), prices=Prices(step_s=0.02)))  # four blocks a step
    swap.preempt(stream(0), Reason.SLICE_ENDED)
    assert [order.num_blocks for order in swap.write_behind([stream(1)])] == [1]
    swap.preempt(stream(2), Reason.SLICE_ENDED)
    assert swap.write_behind([stream(1)]) == ()


# -- a prompt that is swapped out midway resumes with all computed tokens, its tail included ---------------------------


@pytest.mark.parametrize("num_computed", [1, 3, 4, 6, 9])
def test_a_prompt_that_was_swapped_out_continues_where_it_was(num_computed: int) -> None:
    policy = ScriptedPolicy()
    driver = Driver(make_loop(policy=policy, num_slots=16, max_batched_tokens=num_computed, caches_prefixes=False))
    seq_id = driver.submit(range(20), max_tokens=4, ignore_eos=True)
    driver.step()
    out = Preemption(seq_id, PreemptionMode.SWAP, Reason.SLICE_ENDED, Tier.HOST)
    back = Resumption(seq_id, Reason.SLICE_BEGINS)
    policy.script.append(lambda view: Decision(preemptions=(out,)))
    driver.step()
    driver.settle()
    policy.script.append(lambda view: Decision(resumptions=(back,)))
    [copy] = driver.step().transfers
    assert policy.views[-1].swapped[0].num_restorable_tokens == num_computed
    assert len(copy.blocks) == -(-num_computed // 4)
    driver.settle()
    driver.run()
    assert driver.loop.counters.num_recomputed_tokens == 0
    assert sum(computed(plan)[seq_id] for plan in driver.executor.plans if plan.prefills) == 20
