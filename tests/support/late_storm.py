"""A real tiny engine in fp32 under a random policy whose copies arrive late; deterministic by seed.

Its clock counts its readings and its copies run in the engine's thread, so two storms of one seed are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from floodplain import SamplingParams
from floodplain.core.request import Request
from floodplain.core.tiers import Link, Tier
from floodplain.engine.build import build_engine
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import EngineStats
from floodplain.memory.swap_slots import SwapSlots
from floodplain.policy.base import Policy
from floodplain.runtime.prices import Links
from tests.support.calm import MODEL
from tests.support.driven import Disturb, Driven
from tests.support.late_copies import LateTransferEngine
from tests.support.swapping import BLOCK_BYTES, ImpatientPolicy

FLAGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_batched_tokens": 64, "max_num_seqs": 32}


class Ticks:
    """A clock that advances by a tenth of a millisecond at each reading."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> float:
        self._count += 1
        return self._count * 1e-4


@dataclass(kw_only=True)
class LateStorm(Driven):
    """An engine, its pending copies, and its outputs."""

    copies: LateTransferEngine
    slots: SwapSlots
    dice: Random

    def rage(self, requests: Sequence[Request], disturb: Disturb = lambda one, step: None) -> EngineStats:
        """Run until no request is live; at most one arrives before each step."""
        return self.drive(requests, disturb, lambda: self.dice.random() < 0.5)

    def pool_words(self, block: int) -> torch.Tensor:
        """Return the bytes of a block in the pool: [layers, words]."""
        return torch.stack([words[block] for words in self.copies.pool.words])


@contextmanager
def late_storm(
    seed: int,
    *,
    policy: Policy | None = None,
    failing: float = 0.0,
    **flags: Any,
) -> Iterator[LateStorm]:
    """Yield an engine of 24 blocks under ``policy``, by default one with random decisions."""
    swapping = {"kv_memory": 24 * BLOCK_BYTES, "swap": "host", "swap_memory": 40 * BLOCK_BYTES}
    engine = build_engine(EngineConfig(model=MODEL, **(FLAGS | swapping | flags)), policy or ImpatientPolicy())
    try:
        executor: Any = engine._executor
        engine.loop._rng = Random(seed)
        engine.loop.state.links = Links(
            [Link(Tier.HOST, 1e12)], BLOCK_BYTES
        )  # with measured links, runs of one seed would differ
        engine.clock = executor._swap._clock = Ticks()
        old = executor._swap._tiers[Tier.HOST]
        old.close()
        copies = LateTransferEngine(old._store, old.slots, Random(seed), failing=failing)
        executor._swap._tiers[Tier.HOST] = copies
        yield LateStorm(engine, copies=copies, slots=old.slots, dice=Random(seed))
    finally:
        engine.close()


def make_requests(num_requests: int, num_tokens: int, *, num_prefixes: int, num_own_tokens: int) -> list[Request]:
    """Return greedy requests: up to ``num_own_tokens``, after one of the 48-token prefixes if there are any."""
    dice = Random(5)
    prefixes = [tuple(dice.randrange(256) for _ in range(48)) for _ in range(num_prefixes)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    made = []
    for index in range(num_requests):
        own = tuple(dice.randrange(256) for _ in range(dice.randint(1, num_own_tokens)))
        prompt = dice.choice(prefixes) + own if prefixes else own
        made.append(Request(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=float(index)))
    return made
