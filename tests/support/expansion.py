"""A device whose KV layers stream, in virtual time: steps cost T = w + K / H, loads K / (n L) a layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random

from floodplain.core.layer_places import every_place
from floodplain.cost.expansion import step_stall_s
from floodplain.policy.expansion import ExpansionDecision, ExpansionView

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
