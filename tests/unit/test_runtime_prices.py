"""What steps cost, learned from those that ran: the means by hand."""

from __future__ import annotations

import pytest

from floodplain.core.plan import PrefillChunk, StepPlan
from floodplain.core.request import SeqId
from floodplain.core.view import Prices
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.prices import StepPrices
from tests.support.bursts import Machine, burst, make_burst


def plan(num_decodes: int, *chunks: int) -> StepPlan:
    return StepPlan(
        step_id=0,
        decodes=tuple(SeqId(number) for number in range(num_decodes)),
        prefills=tuple(PrefillChunk(SeqId(90 + i), 0, tuple(range(size)), True) for i, size in enumerate(chunks)),
    )


def learned(*steps: tuple[StepPlan, float]) -> Prices:
    prices = StepPrices()
    for one, duration_s in steps:
        prices.learn(one, duration_s)
    return prices.now


def test_nothing_is_known_at_first() -> None:
    assert StepPrices().now == Prices(0.0, 0.0)


def test_the_first_step_is_believed_and_then_a_tenth_of_each() -> None:
    assert learned((plan(3), 0.02)).step_s == 0.02
    assert learned((plan(3), 0.02), (plan(3), 0.03)).step_s == pytest.approx(0.021)
    assert learned((plan(3), 0.02), (plan(3), 0.03), (plan(1), 0.01)).step_s == pytest.approx(0.0199)


def test_a_prompt_alone_pays_for_its_whole_step() -> None:
    assert learned((plan(0, 50), 0.1)) == Prices(0.0, pytest.approx(0.002))


def test_beside_decodes_a_prompt_pays_for_what_it_adds() -> None:
    prices = learned((plan(4), 0.02), (plan(4, 30, 10), 0.06))
    assert prices == Prices(0.02, pytest.approx(0.04 / 40))


def test_a_step_with_a_prompt_that_was_faster_than_one_without_costs_nothing_and_never_less() -> None:
    assert learned((plan(4), 0.02), (plan(4, 40), 0.01)).prefill_token_s == 0.0


def test_a_chunk_of_one_token_is_a_decode() -> None:
    assert learned((plan(0, 1), 0.03)) == Prices(0.03, 0.0)
    assert learned((plan(2, 1, 1), 0.03)) == Prices(0.03, 0.0)
    assert learned((plan(0, 1, 20), 0.03)).prefill_token_s == pytest.approx(0.03 / 20)


def test_few_tokens_of_a_prompt_among_many_decodes_say_nothing() -> None:
    before = learned((plan(9), 0.02))
    assert learned((plan(9), 0.02), (plan(9, 8), 0.9)) == before
    assert learned((plan(9), 0.02), (plan(9, 9), 0.9)) != before


def test_while_every_step_carries_a_prompt_both_prices_follow_the_steps() -> None:
    """Four decodes become 24, and no step shows what these cost alone: 10 ms and 1 ms a token, then twice as much."""
    known = [(plan(4), 0.01), (plan(4, 20), 0.03)]
    assert learned(*known) == Prices(0.01, pytest.approx(0.001))
    prices = learned(*known, *[(plan(24, 20), 0.06)] * 100)
    assert prices.step_s + 20 * prices.prefill_token_s == pytest.approx(0.06, rel=0.05)
    assert prices.step_s > 0.011


def test_few_prompt_tokens_in_every_step_are_no_reason_to_learn_nothing() -> None:
    prices = learned((plan(4), 0.01), (plan(4, 20), 0.03), *[(plan(24, 8), 0.036)] * 100)
    assert prices.step_s == pytest.approx(0.02, rel=0.05)


def test_one_step_without_a_prompt_is_believed_again() -> None:
    mixed = [(plan(24, 20), 0.06)] * 30
    start = [(plan(4), 0.01), (plan(4, 20), 0.03)]
    before, after = learned(*start, *mixed), learned(*start, *mixed, (plan(24), 0.02))
    assert after.step_s == pytest.approx(before.step_s + 0.1 * (0.02 - before.step_s))
    assert after.prefill_token_s == before.prefill_token_s


def test_a_plan_that_only_moves_kv_says_nothing() -> None:
    assert learned((plan(0), 0.5)) == Prices()


def test_the_same_object_is_shown_until_something_is_learned() -> None:
    prices = StepPrices()
    prices.learn(plan(2), 0.02)
    shown = prices.now
    prices.learn(plan(0), 0.5)
    assert prices.now is shown


def test_a_simulated_device_is_priced_as_it_is() -> None:
    machine = Machine(num_blocks=400, max_batched_tokens=200)
    prices = burst(machine, FcfsPolicy(), make_burst(30, interval_s=0.05, num_prompt=60)).loop.state.prices.now
    assert prices.prefill_token_s == pytest.approx(machine.line.prefill_token_s, rel=0.2)
    assert prices.step_s == pytest.approx(machine.line.base_s, rel=0.2)
