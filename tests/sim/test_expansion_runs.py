"""The controller in virtual time: nearly as good as the best fixed number of layers, and quick to adapt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

import pytest

from benchmarks.expansion.pie_expansion import PieExpansion
from floodplain.core.layer_places import every_place
from floodplain.cost.expansion import best_places, step_stall_s
from floodplain.policy.expansion import ExpansionDecision, ExpansionPolicy, ExpansionView

# -- a device whose KV layers stream, in virtual time ------------------------------------------------------------------


NUM_LAYERS = 32
EVERY = tuple(every_place(NUM_LAYERS))
EVERY_BY_NUMBER = {places.num_streamed: places for places in EVERY}
Decide = Callable[[ExpansionView], ExpansionDecision]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Bytes are counted in blocks of all layers: the pool has ``base_blocks`` while no layer streams.

    Attributes:
        weight_blocks: W: weights that a step reads.
        link_ratio: rho: bandwidth of the link over that of the memory.
        block_s: Time in which the memory reads a block.
        token_s: Time of a prompt's token.
    """

    base_blocks: int = 300
    weight_blocks: float = 2000.0
    link_ratio: float = 0.12
    block_s: float = 1e-5
    token_s: float = 0.0

    def count_blocks(self, num_streamed: int) -> int:
        """Return the blocks of the pool while this many layers stream."""
        return int(self.base_blocks * EVERY_BY_NUMBER[num_streamed].expansion)


@dataclass(frozen=True)
class Seen:
    """One step."""

    ended_s: float
    step_s: float
    stall_s: float
    num_streamed: int
    num_tokens: int


@dataclass
class Served:
    """A run; sums are over its steps from ``since`` on."""

    steps: list[Seen] = field(default_factory=list)

    def rate(self, since: int = 0) -> float:
        """Tokens per second."""
        steps = self.steps[since:]
        return sum(step.num_tokens for step in steps) / sum(step.step_s + step.stall_s for step in steps)

    def stall_share(self, since: int = 0) -> float:
        steps = self.steps[since:]
        return sum(step.stall_s for step in steps) / sum(step.step_s + step.stall_s for step in steps)

    def changes(self, since: int = 0) -> list[int]:
        """Return the steps before which the number of streamed layers changed."""
        numbers = [step.num_streamed for step in self.steps]
        return [at for at in range(max(1, since), len(numbers)) if numbers[at] != numbers[at - 1]]


class Load:
    """Requests in line, by blocks: a prompt that is computed in one step, and outputs of 16 tokens a block.

    Args:
        seed: Of their lengths.
        prompt_blocks: Fewest and most blocks of a prompt.
        output_blocks: Fewest and most blocks of an output.
        most_running: The most running requests.
    """

    def __init__(
        self,
        seed: int = 0,
        prompt_blocks: tuple[int, int] = (2, 10),
        output_blocks: tuple[int, int] = (4, 16),
        most_running: float = inf,
    ) -> None:
        self.dice = Random(seed)
        self.prompt_blocks, self.output_blocks = prompt_blocks, output_blocks
        self.most_running = most_running

    def draw(self) -> tuple[int, int]:
        return self.dice.randint(*self.prompt_blocks), self.dice.randint(*self.output_blocks)


def serve(
    device: Device,
    decide: Decide | int,
    load: Load,
    num_steps: int,
    on_step: Callable[[int, float], float | None] = lambda at, now: None,
) -> Served:
    """Serve for ``num_steps`` steps.

    Each request reserves its final size when it starts, and none is preempted. A pool that is to shrink takes no new
    requests beyond its new size; fewer layers stream once the held blocks fit.

    Args:
        device: Its costs and sizes.
        decide: Chooses the streamed layers; or a constant number of them.
        load: The requests.
        num_steps: Steps of the run.
        on_step: Called with the step and the time; may return a new link ratio.
    """
    served, now, link_ratio = Served(), 0.0, device.link_ratio
    held = 0
    running: deque[list[int]] = deque()  # [blocks, tokens until the next block, tokens left, blocks at the end]
    num_streamed = wanted = decide if isinstance(decide, int) else 0
    pending = load.draw()
    for at in range(num_steps):
        link_ratio = on_step(at, now) or link_ratio
        num_blocks = max(held, device.count_blocks(wanted)) if wanted < num_streamed else device.count_blocks(wanted)
        num_streamed = wanted if held <= device.count_blocks(wanted) else num_streamed
        places = EVERY_BY_NUMBER[num_streamed]
        reserved, num_prompt = sum(one[3] for one in running), 0
        while reserved + sum(pending) <= num_blocks and len(running) < load.most_running:
            running.append([pending[0], 16, 16 * pending[1], sum(pending)])
            reserved, num_prompt = reserved + sum(pending), num_prompt + 16 * pending[0]
            pending = load.draw()
        is_binding = len(running) < load.most_running
        num_read = sum(one[0] for one in running)
        step_s = device.block_s * (device.weight_blocks + num_read) + device.token_s * num_prompt
        copy_s = device.block_s * num_read / link_ratio / NUM_LAYERS
        stall_s = step_stall_s(places, step_s, copy_s)
        now += step_s + stall_s
        served.steps.append(Seen(now, step_s, stall_s, num_streamed, len(running)))
        _grow(running)
        held = sum(one[3] for one in running)
        if not isinstance(decide, int):
            view = ExpansionView(
                step_s=step_s, stall_s=stall_s, copy_s=copy_s, num_streamed=num_streamed,
                num_held_blocks=held, num_blocks=num_blocks, is_binding=is_binding,
            )  # fmt: skip
            wanted = decide(view).num_streamed
    return served


def _grow(running: deque[list[int]]) -> None:
    for _ in range(len(running)):
        one = running.popleft()
        one[1] -= 1
        one[2] -= 1
        if not one[1]:
            one[0], one[1] = one[0] + 1, 16
        if one[2]:
            running.append(one)


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
