"""The engine's loop and the controller in virtual time, on a device of which only ratios are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.expansion.expanding import closed_form
from floodplain.core.backups import BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.layer_places import every_place
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.policy.expansion import ExpansionPolicy
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState
from floodplain.sim.environment import Environment
from floodplain.sim.expanding import ExpandingPool, ExpandingStep
from floodplain.sim.instance import VirtualInstance
from floodplain.sim.links import VirtualLinks

NUM_BLOCKS, BLOCK_TOKENS = 600, 16
"""Of the pool without streams: some 60 requests at a time. Only ratios count, so it stands for a pool of any size."""
POOL_S = 0.01
"""Time in which the device reads it."""
RAMP_STEPS, NUM_STEPS = 450, 900
"""Steps until which nothing is counted, and in all: the controller changes something once in 16."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the controller reached: the mean expansion, tokens per second over those without streams, and stalls."""

    expansion: float
    gain: float
    stall_share: float


@cache
def check(num_layers: int, weights_per_pool: float, link_ratio: float) -> Checked:
    """Serve more requests than fit, with the controller and without streams."""
    auto = _serve(num_layers, weights_per_pool, link_ratio, adapts=True)
    plain = _serve(num_layers, weights_per_pool, link_ratio, adapts=False)
    expansions = {places.num_streamed: places.expansion for places in every_place(num_layers)}
    expansion = sum(expansions[step.num_streamed] for step in auto) / len(auto)
    stall_share = sum(step.stall_s for step in auto) / sum(step.step_s + step.stall_s for step in auto)
    return Checked(expansion, _tokens_per_second(auto) / _tokens_per_second(plain), stall_share)


def _tokens_per_second(steps: list[ExpandingStep]) -> float:
    return sum(step.num_sampled for step in steps) / sum(step.step_s + step.stall_s for step in steps)


def _serve(num_layers: int, weights_per_pool: float, link_ratio: float, *, adapts: bool) -> list[ExpandingStep]:
    """Steps after the ramp. Prompts cost nothing, as in the closed form."""
    environment, loop = Environment(), _make_loop()
    every = tuple(every_place(num_layers))
    costs = closed_form(weights_s=weights_per_pool * POOL_S, block_s=POOL_S / NUM_BLOCKS, link_ratio=link_ratio)
    pool = ExpandingPool(loop, every, costs, ExpansionPolicy(every, NUM_BLOCKS) if adapts else None)
    instance = VirtualInstance(environment, loop, pool.step_time_s, VirtualLinks({}, 1))
    instance.on_boundary = pool.at_boundary
    dice, num_requests = Random(1), 0
    while len(pool.steps) < NUM_STEPS:
        while len(loop.state.waiting) < 64:
            instance.submit(_make_request(dice, num_requests))
            num_requests += 1
        environment.run(environment.now + 10 * (weights_per_pool + 10) * POOL_S)
    return pool.steps[RAMP_STEPS:NUM_STEPS]


def _make_loop() -> Loop:
    config = LoopConfig(
        max_model_len=400,
        max_batched_tokens=100_000,
        max_num_seqs=100_000,
        eos_token_ids=frozenset(),
        fingerprint="none",
    )
    ledger = BlockLedger(NUM_BLOCKS, BLOCK_TOKENS, quantum_blocks=1, caches_prefixes=False)
    policy = FcfsPolicy()
    return Loop(LoopState(config, ledger, policy, BackupTable([], retains=False), []), policy, 0)


def _make_request(dice: Random, number: int) -> Request:
    prompt = tuple(range(1000 * number + 1, 1000 * number + 1 + dice.randint(30, 150)))
    params = SamplingParams(temperature=0.0, max_tokens=dice.randint(60, 240), ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, arrival_s=0.0)
