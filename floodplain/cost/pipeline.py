"""A model as the stages of a pipeline: the layers of each stage, and the cost of a chunk of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from floodplain.core.errors import UserError
from floodplain.cost.model_shape import ModelShape
from floodplain.cost.step_time import StepCost

SLACK = 0.1
"""Share by which a stage may cost more than in the most even cut, to gain memory."""


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """The cost of a chunk of one sequence, in any unit: KunServe's Eq. 1, without the constant cost of a batch."""

    cost: StepCost

    def __call__(self, prefix: int, num_tokens: int) -> float:
        """The cost of ``num_tokens`` tokens after a prefix of ``prefix`` tokens."""
        cost = self.cost
        if num_tokens == 1:
            return cost.decode_s + cost.context_token_s * (prefix + 1)
        self_s = cost.self_pair_s * num_tokens * (num_tokens + 1) / 2
        prefix_s = (cost.prefix_token_s + cost.prefix_pair_s * num_tokens) * prefix
        return cost.chunk_s + cost.prefill_token_s * num_tokens + self_s + prefix_s


def cost_by_shape(shape: ModelShape) -> StepCost:
    """A step's parts by counting products, without measurement; the unit is one token without attention.

    A token multiplies by each parameter of a layer once, and by the keys and values of each token that it attends to.
    """
    pair = 2 * shape.q_size / shape.layer_params
    return StepCost(decode_s=1.0, context_token_s=pair, prefill_token_s=1.0, self_pair_s=pair, prefix_pair_s=pair)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage for layers and KV (embedding and head are beside it); of a layer; of a KV block in a layer."""

    num_bytes: int
    layer_bytes: int
    block_bytes: int

    def count_blocks(self, num_layers: int) -> int:
        """KV blocks that fit beside the parameters of ``num_layers`` layers; falls with each layer."""
        return max(0, self.num_bytes - num_layers * self.layer_bytes) // (num_layers * self.block_bytes)


def head_layers(shape: ModelShape) -> float:
    """The work of the output projection, which the last stage also does, in layers."""
    return shape.vocab_size * shape.hidden_size / shape.layer_params


def split_layers(
    num_layers: int, memories: Sequence[StageMemory], head_cost: float, slack: float = SLACK
) -> tuple[range, ...]:
    """Cut a model into stages: of all cuts with nearly even costs, the one with the most KV blocks.

    A pipeline is as slow as its most expensive stage, and each block needs room in all stages. Of cuts with as many
    blocks the most even one is chosen. UserError if there are fewer layers than stages.

    ``head_cost``: cost of the last stage's other work, in layers. ``slack``: share by which the most expensive stage
    may exceed the least possible.
    """
    num_stages = len(memories)
    if num_layers < num_stages:
        raise UserError(f"a model of {num_layers} layers cannot be a pipeline of {num_stages} stages")
    extra = [0.0] * (num_stages - 1) + [head_cost]
    most_cost = (1 + slack) * _least_cost(num_layers, extra)
    dear = [_count_under(most_cost, cost, num_layers) for cost in extra]
    sizes = {count for memory in memories for n in range(1, num_layers + 1) if (count := memory.count_blocks(n))}

    def is_possible(num_blocks: int) -> bool:
        bounds = _bounds(dear, memories, num_blocks, num_layers)
        return min(bounds) > 0 and sum(bounds) >= num_layers

    num_blocks = _last_that(sorted(sizes), is_possible)
    bounds = _bounds(dear, memories, num_blocks, num_layers)
    low = min(_costs(num_layers, extra), key=lambda cost: (sum(_even(bounds, extra, cost)) < num_layers, cost))
    counts = _even(bounds, extra, low)
    while sum(counts) > num_layers:  # of equally expensive stages, the first gives up a layer
        counts[max(range(num_stages), key=lambda stage: (counts[stage] > 1, counts[stage] + extra[stage]))] -= 1
    ends = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(ends))


def _costs(num_layers: int, extra: Sequence[float]) -> list[float]:
    return sorted({n + cost for n in range(1, num_layers + 1) for cost in extra})


def _least_cost(num_layers: int, extra: Sequence[float]) -> float:
    return next(
        cost
        for cost in _costs(num_layers, extra)
        if cost >= 1 + max(extra) and sum(_even([num_layers] * len(extra), extra, cost)) >= num_layers
    )


def _even(bounds: Sequence[int], extra: Sequence[float], cost: float) -> list[int]:
    """The most layers of each stage within its bound and ``cost``; at least one."""
    return [min(bound, _count_under(cost, more, bound)) for bound, more in zip(bounds, extra, strict=True)]


def _count_under(cost: float, extra: float, most: int) -> int:
    return max(1, min(most, int(cost - extra + 1e-9)))


def _bounds(dear: Sequence[int], memories: Sequence[StageMemory], num_blocks: int, num_layers: int) -> list[int]:
    """The most layers of each stage within its cost bound and with room for ``num_blocks``; 0 if it has none."""
    roomy = [
        max((n for n in range(1, num_layers + 1) if memory.count_blocks(n) >= num_blocks), default=0)
        for memory in memories
    ]
    return [min(pair) for pair in zip(dear, roomy, strict=True)]


def _last_that(values: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The largest of rising ``values`` for which ``holds`` is true (it is monotone); 0 if there is none."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if holds(values[middle]) else (low, middle)
    return values[low - 1] if low else 0
