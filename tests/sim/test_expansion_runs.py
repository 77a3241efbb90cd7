"""The controller in virtual time: nearly as good as the best fixed number of layers, and quick to adapt."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf

import pytest

from benchmarks.expansion.pie_expansion import PieExpansion
from floodplain.cost.expansion import best_places
from floodplain.policy.expansion import ExpansionDecision, ExpansionPolicy, ExpansionView
from tests.support.expansion import EVERY, NUM_LAYERS, Device, Load, Served, serve

NUM_STEPS, SETTLED = 1300, 600
POOLS = (300, 500, 1000, 2500)


def auto(device: Device, load: Load, num_steps: int = NUM_STEPS) -> Served:
    return serve(device, ExpansionPolicy(EVERY, device.base_blocks).decide, load, num_steps)


def best_fixed(device: Device, around: int, seed: int) -> float:
    """Return tokens per second of the best fixed number near ``around``; a larger one stalls more."""
    near = [one.num_streamed for one in EVERY if abs(one.num_streamed - around) <= 2 or not one.num_streamed]
    return max(serve(device, number, Load(seed), NUM_STEPS).rate(SETTLED) for number in near)


@pytest.mark.parametrize("base_blocks", POOLS)
def test_auto_is_near_the_best_fixed_number_and_settles_without_stalls(base_blocks: int) -> None:
    device = Device(base_blocks=base_blocks)
    run = auto(device, Load(1))
    number = run.steps[-1].num_streamed
    assert run.rate(SETTLED) >= 0.95 * best_fixed(device, number, 1)
    assert run.stall_share(SETTLED) < 0.01
    assert run.changes(SETTLED) == []
    assert run.rate() >= 0.98 * serve(device, 0, Load(1), NUM_STEPS).rate(), "the way there costs nothing"
    formula = best_places(NUM_LAYERS, device.weight_blocks, base_blocks, device.link_ratio)
    assert abs(number - formula.num_streamed) <= 4, "its pools are never read whole: prompts wait, sequences grow"


def test_where_a_layer_is_a_tenth_of_the_pool_auto_is_near_the_best() -> None:
    """With eleven layers' memory left, one more layer gives 9 % more blocks, and 3 % stalls: over the limit of 1 %."""
    device = Device(base_blocks=150)
    run = auto(device, Load(1))
    assert run.stall_share(SETTLED) < 0.01
    assert run.rate(SETTLED) >= 0.93 * best_fixed(device, run.steps[-1].num_streamed, 1)


@pytest.mark.parametrize("base_blocks", POOLS)
def test_half_the_link_is_answered_within_steps_and_the_whole_one_later(base_blocks: int) -> None:
    """A transfer in the background takes half of the link for 300 steps."""
    lost, back = SETTLED, SETTLED + 300
    device = Device(base_blocks=base_blocks)
    links = {lost: device.link_ratio / 2, back: device.link_ratio}
    decide = ExpansionPolicy(EVERY, base_blocks).decide
    run = serve(device, decide, Load(1), back + 900, lambda at, _: links.get(at))
    before, half = run.steps[lost - 1], run.steps[back - 1]
    assert half.num_streamed < before.num_streamed
    first = run.changes(lost)[0]
    assert first - lost <= 100 and run.steps[first].ended_s - before.ended_s < 5.0
    assert abs(half.num_streamed - run.steps[lost + 100].num_streamed) <= 1
    assert len([at for at in run.changes(lost + 100) if at < back]) <= 1
    assert Served(run.steps[lost + 100 : back]).stall_share() < 0.01
    assert abs(run.steps[-1].num_streamed - before.num_streamed) <= 1


@pytest.mark.parametrize("most_running", [1, 6, 12])
def test_a_light_load_lets_nothing_stream(most_running: int) -> None:
    assert auto(Device(), Load(1, most_running=most_running)).changes() == []


def test_a_load_that_becomes_light_gives_the_layers_back_and_nothing_flaps() -> None:
    load = Load(1)

    def become_light(at: int, _: float) -> None:
        load.most_running = 8 if at >= 500 else inf

    device = Device()
    run = serve(device, ExpansionPolicy(EVERY, device.base_blocks).decide, load, 1500, become_light)
    assert run.steps[499].num_streamed > 10 and run.steps[-1].num_streamed == 0
    numbers = [step.num_streamed for step in run.steps[600:]]
    assert numbers == sorted(numbers, reverse=True) and numbers[500] == 0


@pytest.mark.parametrize("link_ratio", [0.001, 0.005, 0.02, 0.3])
@pytest.mark.parametrize("most_running", [4, 25, inf])
@pytest.mark.parametrize("token_s", [0.0, 1e-3])
def test_no_load_is_served_worse_than_without_expansion(link_ratio: float, most_running: float, token_s: float) -> None:
    device = Device(link_ratio=link_ratio, token_s=token_s)
    load, other = Load(2, most_running=most_running), Load(2, most_running=most_running)
    assert auto(device, load, 600).rate() >= 0.98 * serve(device, 0, other, 600).rate()


class MeansPolicy:
    """Control: a policy that compares the mean step with the mean load."""

    def __init__(self, base_blocks: int) -> None:
        self.policy = ExpansionPolicy(EVERY, base_blocks)
        self.views: deque[ExpansionView] = deque(maxlen=64)

    def decide(self, view: ExpansionView) -> ExpansionDecision:
        self.views.append(view)
        step_s, copy_s = (sum(getattr(one, name) for one in self.views) for name in ("step_s", "copy_s"))
        return self.policy.decide(replace(view, step_s=step_s / len(self.views), copy_s=copy_s / len(self.views)))


@pytest.mark.parametrize(("base_blocks", "token_s"), [(300, 1e-3), (600, 1e-3), (600, 3e-4)])
def test_short_and_long_steps_are_compared_one_by_one(base_blocks: int, token_s: float) -> None:
    """Steps with prompts are up to ten times as long; their idle link time does not help the other steps."""
    device, prompts = Device(base_blocks=base_blocks, token_s=token_s), (10, 40)
    run = auto(device, Load(1, prompts))
    means = serve(device, MeansPolicy(base_blocks).decide, Load(1, prompts), NUM_STEPS)
    assert run.stall_share(SETTLED) < 0.01 < means.stall_share(SETTLED)


def test_pie_finds_the_neighbourhood_by_trying() -> None:
    """The baseline adds layers until compute waits, removes them, and tries again."""
    device = Device(base_blocks=500)
    ours, pie = auto(device, Load(1)), serve(device, PieExpansion(EVERY).decide, Load(1), NUM_STEPS)
    plain = serve(device, 0, Load(1), NUM_STEPS)
    assert pie.rate(SETTLED) > 1.1 * plain.rate(SETTLED)
    assert pie.rate() < ours.rate()
    assert len(pie.changes(SETTLED)) > len(ours.changes(SETTLED))
    light = serve(device, PieExpansion(EVERY).decide, Load(1, most_running=5), NUM_STEPS)
    numbers = [step.num_streamed for step in light.steps[SETTLED:]]
    assert 0 < sum(numbers) / len(numbers) < NUM_LAYERS / 4, "it probes again and again"
