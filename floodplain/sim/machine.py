"""The device of a scenario, resolved: its KV pool, its swap space and links, and what its steps cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from floodplain.core.errors import UserError
from floodplain.core.sizes import format_size, show_size
from floodplain.core.tiers import Direction, Link, Tier
from floodplain.cost.devices import Roofline, predict_blocks
from floodplain.cost.fits import fit_of
from floodplain.cost.kernels import MAX_TOKENS
from floodplain.cost.link import LINKS
from floodplain.cost.step_time import BatchCost
from floodplain.runtime.state import LoopConfig
from floodplain.sim.cost_files import read_kernels, read_steps
from floodplain.sim.scenario import LinkName, Scenario, SwapPart

DTYPE_BYTES = 2
"""Of weights and KV: bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An instance's device by a scenario, resolved.

    Attributes:
        slots: Slots of swap space by tier, the nearest first; those of a lender come with its memory.
        bandwidths: Bytes per second of each direction of named links; policies see the slower one, in ``links``.
        num_lent_blocks: Slots that the lender's memory holds.
        overhead_s: The part of a step's time that is the same for any layers, beside kernels.
        cost_source: Where step times come from, in a line.
    """

    num_blocks: int
    block_bytes: int
    max_model_len: int
    slots: Mapping[Tier, int]
    links: Sequence[Link]
    bandwidths: Mapping[tuple[Tier, Direction], float]
    num_lent_blocks: int
    cost: BatchCost
    overhead_s: float
    cost_source: str


def resolve_machine(scenario: Scenario) -> Machine:
    """The machine of a scenario. UserError if a table cannot be read, or the model does not fit."""
    engine, shape = scenario.engine, scenario.shape
    num_blocks = engine.kv_blocks or predict_blocks(
        shape,
        scenario.device,
        utilisation=engine.utilisation,
        max_num_seqs=engine.max_num_seqs,
        max_batched_tokens=engine.max_batched_tokens,
        block_tokens=engine.block_tokens,
        num_shards=scenario.num_shards,
        dtype_bytes=DTYPE_BYTES,
    )
    block_bytes = engine.block_tokens * shape.kv_bytes_per_token(DTYPE_BYTES, scenario.num_shards)
    longest = min(engine.max_model_len or shape.max_position, num_blocks * engine.block_tokens)
    overhead_s = _find_overhead_s(scenario)
    cost, cost_source = _find_cost(scenario, overhead_s)
    near = scenario.lender or scenario.borrow
    for name in ("swap", "lender", "borrow"):
        given = getattr(scenario, name)
        if given is not None and given.memory < scenario.num_shards * block_bytes:
            least = show_size(scenario.num_shards * block_bytes)
            raise UserError(
                f"{name}.memory: {format_size(given.memory)} is less than one KV block of {least}: raise it"
            )
    host = scenario.swap or (SwapPart(memory=1) if near else None)  # KV of a recall goes there, or is lost
    named = {Tier.PEER: near, Tier.HOST: host}
    parts = {tier: part for tier, part in named.items() if part is not None}
    blocks = {tier: part.memory // scenario.num_shards // block_bytes for tier, part in parts.items()}
    return Machine(
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        max_model_len=longest,
        slots={tier: 0 if tier is Tier.PEER else number for tier, number in blocks.items()},
        links=[Link(tier, *link_of(part.link)) for tier, part in parts.items()],
        bandwidths={key: rate for tier, part in parts.items() for key, rate in _bandwidths(tier, part.link)},
        num_lent_blocks=blocks.get(Tier.PEER, 0),
        cost=cost,
        overhead_s=overhead_s,
        cost_source=cost_source,
    )


def _bandwidths(tier: Tier, name: LinkName) -> Iterator[tuple[tuple[Tier, Direction], float]]:
    if isinstance(name, str):
        yield (tier, Direction.OUTBOUND), LINKS[name].outbound.peak_bandwidth
        yield (tier, Direction.INBOUND), LINKS[name].inbound.peak_bandwidth


def link_of(name: LinkName) -> tuple[float, float]:
    """(bytes per second, seconds before the first) of the slower direction of a link."""
    if not isinstance(name, str):
        return name, 0.0
    both = LINKS[name].outbound, LINKS[name].inbound
    return min(curve.peak_bandwidth for curve in both), max(curve.latency_s for curve in both)


def loop_config(scenario: Scenario, machine: Machine, depth: int = 1) -> LoopConfig:
    """Limits of the loops of a scenario's engines; ``depth`` is the number of stages."""
    return LoopConfig(
        max_model_len=machine.max_model_len,
        max_batched_tokens=scenario.engine.max_batched_tokens,
        max_num_seqs=scenario.engine.max_num_seqs,
        max_waiting=2**31,
        depth=depth,
        block_bytes=machine.block_bytes,
    )


def _find_overhead_s(scenario: Scenario) -> float:
    part = scenario.cost
    if part.overhead_ms is not None:
        return part.overhead_ms / 1e3
    return 0.0 if part.steps is not None else scenario.device.overhead_s


def _find_cost(scenario: Scenario, overhead_s: float) -> tuple[BatchCost, str]:
    part, shape, device = scenario.cost, scenario.shape, scenario.device
    if part.kernels is not None:
        for name in ("max_batched_tokens", "max_num_seqs"):
            if (most := getattr(scenario.engine, name)) > MAX_TOKENS:
                raise UserError(
                    f"engine.{name}: cost.kernels prices steps of at most {MAX_TOKENS}, not {most}: lower it"
                )
        token_bytes, shards = shape.hidden_size * DTYPE_BYTES, scenario.num_shards
        sizes = (1, max(2, scenario.engine.max_batched_tokens)) if shards > 1 else ()
        sums = {tokens: device.all_reduce.time_s(tokens * token_bytes, shards) for tokens in sizes}
        kernels = read_kernels(part.kernels, shape, sums, overhead_s, scenario.engine.max_num_seqs)
        return kernels, f"kernels in {part.kernels}"
    if part.steps is not None:
        steps, measured = read_steps(part.steps, overhead_s)
        return steps, f"step profile {part.steps} of {measured}"
    if (fit := fit_of(device.name, shape.name, scenario.num_shards)) is not None:
        return fit.with_overhead(overhead_s), f"{fit.source}; median error of a step {fit.median_error:.1%}"
    roofline = Roofline(shape, device, scenario.num_shards, DTYPE_BYTES, overhead_s)
    return roofline, f"roofline, up to 20 % off where it was checked ({device.source})"
