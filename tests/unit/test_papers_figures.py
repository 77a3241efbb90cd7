"""What the papers' figures compute: loads, AQUA in closed form, KunServe's bursts, Pie's layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from floodplain.cost.devices import device_named
from floodplain.cost.link import GB
from floodplain.cost.step_time import StepCost
from floodplain.papers.aqua_prefix import SCENARIO, serve_blocking
from floodplain.papers.aqua_producers import Contention
from floodplain.papers.aqua_streams import A100, H100, Copying, LongPrompt, lending_times, measure_throughput
from floodplain.papers.kunserve_bursts import LONGBENCH_14B, OWN, Load, late_share, over_time
from floodplain.papers.kunserve_cost import FIGURE_15, MEASURED, Microbatches, deviations
from floodplain.papers.kunserve_limits import BURST_S, ENDLESS_S, stands_s
from floodplain.papers.pie_adaptive import waits_of
from floodplain.papers.pie_flexgen import FlexGen, Guess
from floodplain.papers.pie_serving import AT_ONCE, Case, log_normal
from floodplain.papers.pie_serving import SHAREGPT as PIE_LOAD
from floodplain.papers.registry import FIGURES
from floodplain.papers.serving import ARXIV, SHAREGPT, Burst, Lengths, Served, poisson_rows, scenario_of
from floodplain.workload.traces import TraceRow

# -- loads: a burst's phases and its pause, and lengths by their quantiles ---------------------------------------------


BURST = Burst(rate=0.5, factor=3.0, pause_s=90.0, num_before=20, num_after=8, burst_s=40.0)


def test_a_burst_has_its_rates_and_a_pause_without_arrivals() -> None:
    times = [row.arrival_s for row in BURST.rows(SHAREGPT, 5)]
    assert times == sorted(times) and len(times) == 20 + 60 + 8
    for count, start_s, end_s in ((20, 0.0, 40.0), (60, 40.0, 80.0), (0, 80.0, 170.0), (8, 170.0, 186.0)):
        assert sum(start_s <= when < end_s for when in times) == count


def test_a_load_is_the_same_for_the_same_seed_only() -> None:
    assert BURST.rows(SHAREGPT, 5) == BURST.rows(SHAREGPT, 5) != BURST.rows(SHAREGPT, 6)
    assert poisson_rows(ARXIV, 2.0, 30, 1) == poisson_rows(ARXIV, 2.0, 30, 1) != poisson_rows(ARXIV, 2.0, 30, 2)
    assert all(7.0 <= row.arrival_s <= 22.0 for row in poisson_rows(ARXIV, 2.0, 30, 1, start_s=7.0))


@pytest.mark.parametrize("lengths", [SHAREGPT, ARXIV])
def test_lengths_have_the_quantiles_that_the_papers_state(lengths: Lengths) -> None:
    drawn = np.array(lengths.draw(20_000, np.random.default_rng(0)))
    assert np.median(drawn, axis=0) == pytest.approx([lengths.prompt[0], lengths.output[0]], rel=0.05)
    assert np.quantile(drawn, 0.9, axis=0) == pytest.approx([lengths.prompt[1], lengths.output[1]], rel=0.05)
    assert drawn.min() >= 1 and drawn.sum(axis=1).max() <= lengths.longest


# -- AQUA's long prompts and lenders in closed form: what limits them, and what contention can do ----------------------


BESIDE, BEFORE = Copying(overlaps=True), Copying(overlaps=False)


@pytest.mark.parametrize("prompt", [A100, H100])
def test_streaming_takes_at_least_the_longer_of_copies_and_compute(prompt: LongPrompt) -> None:
    copies_s = prompt.num_layers * prompt.layer_bytes / prompt.dram
    longest_s = max(prompt.step_s, copies_s)
    assert longest_s <= prompt.dram_s(BESIDE) <= longest_s + prompt.layer_bytes / prompt.dram + prompt.step_s
    assert prompt.dram_s(BEFORE) == pytest.approx(prompt.step_s + copies_s)
    assert prompt.own_s(BESIDE) <= prompt.aqua_s(BESIDE) < prompt.aqua_s(BEFORE) < prompt.dram_s(BESIDE)


def test_a_link_as_slow_as_dram_gains_nothing() -> None:
    slow = replace(H100, dram=396.4e9)
    assert slow.dram_s(BESIDE) == pytest.approx(slow.aqua_s(BESIDE), rel=0.01)
    assert measure_throughput(BESIDE, 0).quantities["gain"] > 4


def test_layers_that_do_not_fit_stream() -> None:
    longer = replace(H100, prompt=4 * H100.prompt)
    assert longer.own_s(BESIDE) > longer.step_s
    assert H100.own_s(BESIDE) == H100.step_s


def test_a_prefix_is_loaded_at_each_hit_and_not_by_the_first() -> None:
    scenario = scenario_of(SCENARIO)
    rows = [TraceRow(10.0 * number, 1200, 5, (1, 2) * (number != 2)) for number in range(4)]
    plain, loaded = serve_blocking(scenario, rows, 0.0), serve_blocking(scenario, rows, 1.0)
    assert [b - a for a, b in zip(plain, loaded, strict=True)] == pytest.approx([0.0, 1.0, 0.0, 1.0])
    assert plain[1] < plain[0]  # what is shared is not computed again


def test_contention_takes_bandwidth_in_proportion_to_what_is_copied() -> None:
    plain = device_named("h100-80gb")
    assert Contention(0.0, 0.0).slow(plain, H100) == plain
    taken = [plain.bandwidth - Contention(factor, 0.0).slow(plain, H100).bandwidth for factor in (1.0, 2.0)]
    assert 0 < taken[0] <= 396.5e9 and taken[1] == pytest.approx(2 * taken[0])
    slowed = Contention(0.0, 0.5).slow(plain, H100)
    assert slowed.bandwidth == plain.bandwidth
    assert plain.all_reduce.bandwidth / 2 <= slowed.all_reduce.bandwidth < plain.all_reduce.bandwidth


def test_a_producer_lends_again_after_a_calm_window() -> None:
    times = [float(second) for second in range(20)]
    short = [second != 5 for second in range(20)]
    calm = lending_times(times, short)
    assert [when for when, lends in zip(times, calm, strict=True) if not lends] == [5, 6, 7, 8, 9]
    assert all(lending_times(times, [True] * 20)) and not any(lending_times(times, [False] * 20))


# -- KunServe's figures: what they compute, against its laws, and every claim has its number ---------------------------


LONGEST = list(FIGURE_15.unknown.values) if FIGURE_15.unknown else []
FAINT = Load(0.05, 2.0)


def served(*ttft_s: float) -> Served:
    return Served(ttft_s=ttft_s, tpot_s=(), e2e_s=(), result={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kunserve-2", FAINT), ("kunserve-5", 0.02), ("kunserve-12", FAINT), ("kunserve-13", FAINT),
        ("kunserve-14", FAINT), ("kunserve-16", FAINT), ("kunserve-17", 0.02), ("pie-10", Guess(0.5)),
    ],
)  # fmt: skip
def test_each_claim_has_its_number(name: str, value: object) -> None:
    found = FIGURES[name].measure(value, 1).quantities
    assert {key for one in FIGURES[name].statements for key in (one.quantity, one.own) if key} <= set(found)


def test_attention_is_missed_more_by_longer_prompts() -> None:
    runs = [FIGURE_15.run_once(label, 0).quantities for label in LONGEST]
    for name in ("matrices_prompts", "matrices_chunks"):
        assert [run[name] for run in runs] == sorted(run[name] for run in runs)
    assert all(run["matrices_chunks"] > run["matrices_prompts"] > run["ours_prompts"] for run in runs)


def test_a_model_of_nothing_is_off_by_all() -> None:
    batches = Microbatches(4096)
    assert deviations(StepCost(), batches, batches.prompts) == [100.0] * len(batches.prompts)


def test_two_chunks_cost_the_attention_of_one_prompt() -> None:
    batches = Microbatches(2 * MEASURED)
    for before, tokens in batches.later_chunks:
        if (0, before) in batches.prompts:
            matrices_s = batches.matrices_s(before) + batches.matrices_s(tokens)
            whole_s = batches.time_s((0, before + tokens)) - batches.matrices_s(before + tokens)
            assert batches.time_s((0, before)) + batches.time_s((before, tokens)) - matrices_s == pytest.approx(whole_s)
    assert max(before + tokens for before, tokens in batches.later_chunks) == 2 * MEASURED


def test_memory_is_full_at_a_rate_that_follows_instances_and_memory() -> None:
    rate = LONGBENCH_14B.rate(1.0)
    assert LONGBENCH_14B.rate(0.5) == pytest.approx(rate / 2)
    assert replace(LONGBENCH_14B, num_instances=6).rate(1.0) == pytest.approx(3 * rate)
    small = replace(LONGBENCH_14B, place=dict(LONGBENCH_14B.place) | {"device": "a100-40gb"})
    assert small.rate(1.0) < 0.5 * rate


def test_a_burst_has_twice_the_rate_for_its_time() -> None:
    rows = Load(0.5, 60.0).of(LONGBENCH_14B).rows(20.0, 1)
    assert rows == sorted(rows, key=lambda row: row.arrival_s)
    counts = [sum(start <= row.arrival_s < end for row in rows) for start, end in ((0, 45), (45, 105), (105, 150))]
    assert counts == pytest.approx([45 * 20, 60 * 40, 45 * 10], rel=0.1)


def test_drops_need_a_second_instance() -> None:
    assert LONGBENCH_14B.ways()[OWN]["relief"]["mode"] == "auto"
    assert replace(LONGBENCH_14B, num_instances=1).ways()[OWN]["relief"] is None


def test_requests_are_late_above_the_limit() -> None:
    assert late_share([1.0, 2.0, 3.0, 4.0], 2.0) == 50.0
    rows = [TraceRow(when, 1, 1) for when in (1.0, 2.0, 11.0)]
    assert over_time(rows, {"way": served(1.0, 3.0, 5.0)}) == {"way": ([0.0, 10.0], [2.0, 5.0])}


def test_a_burst_stands_until_the_mean_of_a_window_is_late() -> None:
    rows = [TraceRow(when, 1, 1) for when in (1.0, 2.0, BURST_S + 1, BURST_S + 2, BURST_S + 11)]
    assert stands_s(rows, served(1.0, 1.0, 9.0, 1.0, 4.9)) == ENDLESS_S
    assert stands_s(rows, served(1.0, 1.0, 9.0, 1.0, 5.1)) == 20.0
    assert stands_s(rows, served(1.0, 9.0, 40.0, 1.0, 5.1)) == ENDLESS_S  # what is late follows from the time before


# -- Pie's figures: what they compute follows bandwidth, memory and padding --------------------------------------------


SHORT = replace(PIE_LOAD.scaled(0.3), num_requests=24)
CASE = Case("opt-13b", SHORT, 0.6)
BATCHES = FlexGen(0.5, 3 * GB, 100, 50)


def test_streamed_layers_gain_and_a_slow_link_loses() -> None:
    alone = CASE.tokens_per_s(1.0, 1)
    by_link = [CASE.tokens_per_s(2.0, 1, link=link) for link in (4 * GB, 40 * GB, 400 * GB)]
    assert by_link == sorted(by_link)
    assert by_link[0] < alone < by_link[-1]


def test_tokens_arrive_no_faster_than_their_requests() -> None:
    rows = SHORT.rows(2.0, 1)
    tokens = sum(row.output_tokens for row in rows)
    assert CASE.tokens_per_s(1.0, 1, 2.0) <= tokens / rows[-1].arrival_s
    assert CASE.tokens_per_s(1.0, 1, 2.0) < CASE.tokens_per_s(1.0, 1, AT_ONCE)


def test_both_parts_of_a_latency_are_all_of_it() -> None:
    served = CASE.serve(1.0, 1)
    per_token = sum(served.e2e_s) / sum(row.output_tokens for row in SHORT.rows(AT_ONCE, 1))
    assert sum(waits_of(served)) == pytest.approx(per_token)
    assert min(waits_of(served)) > 0


def test_log_normal_lengths_have_their_mean() -> None:
    median, p90 = log_normal(100.0, 1.0)
    lengths = replace(PIE_LOAD.lengths, prompt=(median, p90), longest=10**6)
    rows = replace(PIE_LOAD, lengths=lengths, num_requests=40_000).rows(AT_ONCE, 1)
    assert sum(row.prompt_tokens for row in rows) / 40_000 == pytest.approx(100, rel=0.03)


def test_a_flexgen_batch_waits_for_its_weights() -> None:
    resident = replace(BATCHES, host_share=0.0)
    assert resident.batch_size < BATCHES.batch_size  # weights in host memory make room for KV
    assert resident.batch_s < BATCHES.batch_s
    assert (
        Guess(0.5).flexgen(SHORT.rows(AT_ONCE, 1)).batch_size
        < Guess(0.5, False).flexgen(SHORT.rows(AT_ONCE, 1)).batch_size
    )


def test_flexgen_serves_in_batches_in_order_of_arrival() -> None:
    size, batch_s = BATCHES.batch_size, BATCHES.batch_s
    ends_s = BATCHES.serve([0.0] * (size + 1))
    assert ends_s == [batch_s] * size + [2 * batch_s]
    assert BATCHES.serve([0.0, 0.5 * batch_s, 9 * batch_s]) == pytest.approx([batch_s, 2 * batch_s, 10 * batch_s])
