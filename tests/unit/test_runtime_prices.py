"""Prices of steps and links, learned from completed ones: known lines, drift, ambiguous steps."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.plan import PrefillChunk, StepPlan
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.tiers import CopyTime, Direction, Link, Tier
from floodplain.core.view import Prices
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from floodplain.runtime.prices import Links, StepPrices
from tests.support.bursts import Machine, burst, make_burst
from tests.support.loops import FakeExecutor, make_loop, make_request


def plan(num_decodes: int, *chunks: int) -> StepPlan:
    return StepPlan(
        step_id=0,
        decodes=tuple(SeqId(number) for number in range(num_decodes)),
        prefills=tuple(PrefillChunk(SeqId(90 + i), 0, tuple(range(size)), True) for i, size in enumerate(chunks)),
    )


def learned(*steps: tuple[StepPlan, float]) -> Prices:
    prices = StepPrices()
    for one, duration_s in steps:
        prices.learn(*one.count_work(), duration_s)
    return prices.now


def serve(prices: StepPrices, num_prompt: int, num_rounds: int) -> None:
    """Ten streams in steps of 20 ms, 1 ms for a prompt token; in each round of six steps one ends after 60 decodes."""
    for _ in range(num_rounds):
        for _ in range(5):
            prices.learn(*plan(10).count_work(), 0.02)
        prices.learn(*plan(10, num_prompt).count_work(), 0.02 + 0.001 * num_prompt)
        prices.learn_end(num_prompt)


def test_the_share_of_prompts_is_that_of_the_work() -> None:
    """30 prompt tokens and 60 decodes cost 30 and 120 ms; 600 tokens, 600 ms."""
    prices = StepPrices()
    prices.learn(*plan(10).count_work(), 0.02)
    prices.learn(*plan(10, 20).count_work(), 0.04)
    assert prices.now.prompt_share == 0.0  # no request has ended
    serve(prices, 30, 100)
    assert prices.now.prompt_share == pytest.approx(30 / 150, rel=0.05)
    serve(prices, 600, 100)
    assert prices.now.prompt_share == pytest.approx(600 / 720, rel=0.05)


def test_streams_that_go_on_count_although_the_short_ones_end_first() -> None:
    """After eight short requests, ten with long answers begin, and one of them ends soon."""
    prices = StepPrices()
    for _ in range(8):
        prices.learn(*plan(1, 30).count_work(), 0.05)
        prices.learn_end(30)
    prices.learn(*plan(1).count_work(), 0.02)
    assert prices.now.prompt_share > 0.5
    for _ in range(100):
        prices.learn(*plan(10).count_work(), 0.02)
    prices.learn_end(30)
    prices.learn(*plan(10).count_work(), 0.02)
    assert prices.now.prompt_share < 0.2


def test_one_long_prompt_is_no_load_of_long_prompts() -> None:
    """One prompt twenty times as long as those before it moves the share little; the third moves it."""
    prices, shares = StepPrices(), []
    serve(prices, 30, 200)
    for _ in range(3):
        serve(prices, 600, 1)
        prices.learn(*plan(10).count_work(), 0.02)
        shares.append(prices.now.prompt_share)
    assert shares[0] < 0.3 < shares[2]


def test_a_request_that_computed_nothing_changes_no_price() -> None:
    prices = StepPrices()
    prices.learn_end(0)
    prices.learn(*plan(10, 20).count_work(), 0.04)
    assert prices.now.prompt_share == 0.0


LINES = st.tuples(st.floats(1e-4, 1.0), st.floats(0.0, 0.2), st.floats(1e-3, 0.2))
"""Seconds of a step; a decode and a prompt token as fractions of it."""


@given(LINES, st.integers(0, 2**32))
def test_steps_of_all_kinds_show_their_line(line: tuple[float, float, float], seed: int) -> None:
    dice = Random(seed)
    base_s, decode_s, token_s = line[0], line[0] * line[1], line[0] * line[2]
    steps = []
    for _ in range(200):
        num_decodes, num_prefill = dice.randint(1, 40), dice.choice([0, 0, dice.randint(2, 200)])
        chunks = (num_prefill,) if num_prefill else ()
        steps.append((plan(num_decodes, *chunks), base_s + num_decodes * decode_s + num_prefill * token_s))
    steps += [(plan(20), base_s + 20 * decode_s)] * 50
    prices = learned(*steps)
    assert prices.step_s == pytest.approx(base_s + 20 * decode_s, rel=0.02)
    assert prices.prefill_token_s == pytest.approx(token_s, rel=0.1)


def test_the_first_step_is_believed() -> None:
    assert learned((plan(3), 0.02)).step_s == pytest.approx(0.02, rel=0.02)
    assert learned((plan(0, 50), 0.1)).step_s == 0.0  # no step with a decode was seen


def test_a_machine_that_slows_down_is_followed_within_tens_of_steps() -> None:
    before = [(plan(8), 0.02)] * 100
    assert learned(*before, *[(plan(8), 0.03)] * 5).step_s < 0.028
    assert learned(*before, *[(plan(8), 0.03)] * 40).step_s == pytest.approx(0.03, rel=0.02)


def test_one_step_that_stumbles_moves_little() -> None:
    assert learned(*[(plan(8), 0.02)] * 100, (plan(8), 0.2)).step_s < 0.024


def test_a_lone_step_costs_what_a_step_and_one_decode_do() -> None:
    steps = [(plan(count), 0.01 + 0.001 * count) for count in (1, 20, 5, 12)] * 40
    assert learned(*steps).lone_step_s == pytest.approx(0.011, rel=0.05)
    assert learned((plan(0, 30), 0.02)).lone_step_s == 0.0


def test_copies_beside_steps_do_not_change_what_a_token_takes_without_load() -> None:
    """Copies double the time of steps; the last line is the control: ``lone_step_s`` has them in it."""
    prices = StepPrices()
    for count in (1, 20, 5, 12) * 40:
        prices.learn(count, 0, 0.01 + 0.001 * count)
    for count in (20, 25, 22) * 40:
        prices.learn(count, 0, 2 * (0.01 + 0.001 * count), has_copies=True)
    assert prices.now.unloaded_step_s == pytest.approx(0.011, rel=0.05)
    assert prices.now.lone_step_s > 0.013


def test_a_step_without_copies_has_no_price_before_there_was_one() -> None:
    prices = StepPrices()
    prices.learn(4, 0, 0.02, has_copies=True)
    assert prices.now.unloaded_step_s == 0.0 < prices.now.lone_step_s


def test_the_price_of_prompts_is_never_negative() -> None:
    assert learned(*[(plan(4), 0.02), (plan(4, 40), 0.01)] * 20).prefill_token_s == 0.0


def test_a_chunk_of_one_token_is_a_decode() -> None:
    assert learned((plan(0, 1), 0.03)) == learned((plan(1), 0.03))
    assert learned((plan(2, 1, 1), 0.03)) == learned((plan(4), 0.03))
    assert learned((plan(0, 1, 20), 0.03)) == learned((plan(1, 20), 0.03))


def test_a_short_prompt_alone_does_not_make_prompts_dear() -> None:
    """Most of its time is the step's fixed part; longer prompts correct a price learned from it."""
    lone = [(plan(0, 8), 0.0124), *[(plan(1), 0.0102)] * 60]
    assert learned(*lone, *[(plan(2, 250), 0.0104 + 0.075)] * 3).prefill_token_s == pytest.approx(0.0003, rel=0.1)


def test_while_every_step_carries_a_prompt_prices_follow_the_steps() -> None:
    """Four decodes become 24, and no step has decodes alone; the price of a decode was learned before."""
    known = [*[(plan(number), 0.008 + 0.0005 * number) for number in range(1, 5)] * 20, (plan(4, 20), 0.03)]
    prices = learned(*known, *[(plan(24, 20), 0.04)] * 100)
    assert prices.step_s == pytest.approx(0.02, rel=0.1)
    assert prices.prefill_token_s == pytest.approx(0.001, rel=0.2)


def test_what_nothing_is_paid_for_keeps_its_price() -> None:
    known = [(plan(4), 0.02), (plan(4, 40), 0.06)] * 20
    before, after = learned(*known), learned(*known, *[(plan(4), 0.02)] * 3000)
    assert after.prefill_token_s == pytest.approx(before.prefill_token_s, rel=0.02)


def test_the_same_object_is_shown_until_something_is_learned() -> None:
    prices = StepPrices()
    prices.learn(*plan(2).count_work(), 0.02)
    shown = prices.now
    prices.learn(*plan(0).count_work(), 0.5)
    assert prices.now is shown


def test_a_simulated_device_is_priced_as_it_is() -> None:
    machine = Machine(num_blocks=400, max_batched_tokens=200)
    prices = burst(machine, FcfsPolicy(), make_burst(30, interval_s=0.05, num_prompt=60)).loop.state.prices.now
    assert prices.prefill_token_s == pytest.approx(machine.line.prefill_token_s, rel=0.2)
    assert prices.step_s == pytest.approx(machine.line.base_s, rel=0.2)


# -- prices of links follow completed copies; the oracle is the line behind their times --------------------------------


BLOCK_BYTES = 1000
BLOCK_S = 1e-4
OUT, IN = Direction.OUTBOUND, Direction.INBOUND
MEASURED = Link(Tier.HOST, BLOCK_BYTES / BLOCK_S)


def block_s(links: Links) -> float:
    return BLOCK_BYTES / links[Tier.HOST].bandwidth


def copy(links: Links, num_blocks: int, latency_s: float, price_s: float, way: Direction = OUT) -> None:
    links.learn(CopyTime(Tier.HOST, way, 1, num_blocks, latency_s + num_blocks * price_s))


def copy_often(links: Links, latency_s: float, price_s: float, num_times: int = 300, noise: float = 0.0) -> None:
    dice = Random(1)
    for number in range(num_times):
        factor = dice.uniform(1 - noise, 1 + noise)
        copy(
            links, dice.choice([1, 1, 4, 12, 40]), latency_s * factor, price_s * factor, way=(OUT, IN)[number % 2 == 0]
        )


def test_copies_as_quick_as_measured_change_nothing() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, BLOCK_S)
    assert block_s(links) == pytest.approx(BLOCK_S)
    assert links[Tier.HOST].latency_s == pytest.approx(0.0, abs=1e-9)


def test_a_link_whose_blocks_seem_to_cost_nothing_stays_as_it_was() -> None:
    """Large copies that take less time than small ones are noise: no bandwidth fits."""
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, 3 * BLOCK_S)
    known = links[Tier.HOST]
    for number in range(800):
        num_blocks, seconds = ((1, 0.01), (1000, 0.005))[number // 2 % 2]
        links.learn(CopyTime(Tier.HOST, (OUT, IN)[number % 2 == 0], 1, num_blocks, seconds))
    assert links[Tier.HOST] == known != MEASURED


@pytest.mark.parametrize("factor", [0.2, 5.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_link_that_has_become_quicker_or_slower_is_followed(factor: float, noise: float) -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, factor * BLOCK_S, noise=noise)
    assert block_s(links) == pytest.approx(factor * BLOCK_S, rel=0.3 if noise else 0.1)
    copy_often(links, 0.0, BLOCK_S, noise=noise)
    assert block_s(links) == pytest.approx(BLOCK_S, rel=0.3 if noise else 0.1)


def test_what_each_copy_costs_by_itself_is_not_the_price_of_a_block() -> None:
    """Single blocks take six times as long as blocks of a large copy: a mean would price blocks too high."""
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 5 * BLOCK_S, BLOCK_S)
    assert block_s(links) == pytest.approx(BLOCK_S, rel=0.15)
    assert links[Tier.HOST].latency_s == pytest.approx(5 * BLOCK_S, rel=0.15)


def test_one_slow_copy_is_no_slow_link() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    copy_often(links, 0.0, BLOCK_S)
    copy(links, 10, 1.0, BLOCK_S)
    assert block_s(links) < 2 * BLOCK_S


def test_the_slower_direction_counts() -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    for _ in range(300):
        copy(links, 10, 0.0, 4 * BLOCK_S, way=IN)
        copy(links, 10, 0.0, BLOCK_S / 2)
    assert block_s(links) == pytest.approx(4 * BLOCK_S, rel=0.1)


def test_tiers_are_priced_apart() -> None:
    links = Links([MEASURED, Link(Tier.PEER, 1e9, 1e-5)], BLOCK_BYTES)
    copy_often(links, 0.0, 5 * BLOCK_S)
    assert links[Tier.PEER] == Link(Tier.PEER, 1e9, 1e-5)


@pytest.mark.parametrize("copied", [CopyTime(Tier.HOST, IN, 1, 0, 1.0), CopyTime(Tier.HOST, IN, 1, 5, 0.0)])
def test_from_nothing_nothing_is_learned(copied: CopyTime) -> None:
    links = Links([MEASURED], BLOCK_BYTES)
    links.learn(copied)
    assert links[Tier.HOST] == MEASURED


# -- the loop learns the prompt share from all ended requests that had a token, aborted or not -------------------------


class Bench:
    """A loop over a device whose steps take 20 ms and 1 ms for every prompt token."""

    def __init__(self) -> None:
        self.loop: Loop = make_loop(num_blocks=64, max_batched_tokens=8)
        self._executor = FakeExecutor(self.loop.state.ledger.block_tokens)
        self._now = 0.0

    def submit(self, first_token: int, num_prompt: int) -> SeqId:
        prompt = tuple(range(first_token, first_token + num_prompt))
        return self.loop.submit(make_request("r", prompt, self._now, max_tokens=20, ignore_eos=True))

    def step(self) -> None:
        plan = self.loop.next_plan(self._now)
        assert isinstance(plan, StepPlan)
        self._now += 0.02 + 0.001 * sum(len(chunk.token_ids) for chunk in plan.prefills)
        self.loop.complete(self._executor.execute(plan), self._now)

    def abort(self, seq_id: SeqId) -> None:
        assert self.loop.finish(seq_id, FinishReason.ABORT, self._now)

    def prompt_share(self) -> float:
        """The share after one more step."""
        self.step()
        return self.loop.state.prices.now.prompt_share


def beside_a_long_one() -> Bench:
    bench = Bench()
    bench.submit(1000, 4)
    bench.step()
    return bench


def test_a_client_that_hangs_up_after_its_first_token_counts() -> None:
    bench = beside_a_long_one()
    seq_id = bench.submit(1, 8)
    for _ in range(2):
        bench.step()
    bench.abort(seq_id)
    assert bench.prompt_share() > 0.05


def test_a_request_aborted_before_its_first_token_does_not_count() -> None:
    """Its partly computed prompt is no measure of other prompts."""
    bench = beside_a_long_one()
    computes = bench.submit(1, 24)
    bench.step()
    assert 0 < bench.loop.state.sequences[computes].num_computed < 24
    waits = bench.submit(100, 8)
    bench.abort(computes)
    bench.abort(waits)
    assert bench.prompt_share() == 0.0


def test_what_a_prefix_spared_does_not_count() -> None:
    shares = []
    for first_token in (1, 100):  # the same prompt again, and another
        bench = beside_a_long_one()
        for token in (1, first_token):
            seq_id = bench.submit(token, 16)
            for _ in range(3):
                bench.step()
            bench.abort(seq_id)
        shares.append(bench.prompt_share())
    assert 0 < shares[0] < 0.8 * shares[1]
