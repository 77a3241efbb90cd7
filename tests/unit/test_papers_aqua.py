"""AQUA's long prompts and lenders in closed form: what limits them, and what contention can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodplain.cost.devices import device_named
from floodplain.papers.aqua_prefix import SCENARIO, serve_blocking
from floodplain.papers.aqua_producers import Contention
from floodplain.papers.aqua_streams import A100, H100, Copying, LongPrompt, lending_times, measure_throughput
from floodplain.papers.serving import scenario_of
from floodplain.sim.machine import resolve_machine
from floodplain.workload.traces import TraceRow

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
    machine = resolve_machine(scenario_of(SCENARIO))
    rows = [TraceRow(10.0 * number, 1200, 5, (1, 2) * (number != 2)) for number in range(4)]
    plain, loaded = serve_blocking(machine, rows, 0.0), serve_blocking(machine, rows, 1.0)
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
