"""Sensitivity of the swap tests: one wrong block of one sequence, once, with a digest that matches.

Only the outputs can show it. Zeroing all of swap space in every step is easy to notice; a real mistake is smaller.
Tokens alone miss most of the small mistakes; logprobs miss none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from floodplain.core.plan import StepPlan, StepResult
from floodplain.core.request import Request
from floodplain.core.sequence import Sequence as Seq
from floodplain.memory.digest import compute_digests, compute_weights
from floodplain.memory.swap_slots import EMPTY_DIGEST, SwapSlots
from tests.support.calm import run_calmly
from tests.support.late_storm import FLAGS, LateStorm, late_storm, make_requests
from tests.support.parity import Reference, judge

pytestmark = pytest.mark.slow

NUM_STORMS = 10
BLOCK_TOKENS, TOKEN_WORDS = 16, 32
Forgery = Callable[[SwapSlots, int, Random], None]


def zeros(slots: SwapSlots, slot: int, dice: Random) -> None:
    slots.words[slot] = 0


def the_block_of_another_slot(slots: SwapSlots, slot: int, dice: Random) -> None:
    """As if bookkeeping named the wrong slot: every word is KV, but of another block."""
    others = [i for i, digest in enumerate(slots.digests) if digest not in (EMPTY_DIGEST, slots.digests[slot])]
    slots.words[slot] = slots.words[dice.choice(others)]


def its_tokens_one_place_further(slots: SwapSlots, slot: int, dice: Random) -> None:
    words = slots.words[slot]
    words[:] = words.view(2, 2, BLOCK_TOKENS, TOKEN_WORDS).roll(1, 2).view(words.shape)


def a_forgotten_token(slots: SwapSlots, slot: int, dice: Random) -> None:
    """The K and V of the block's first token are zero, all others are right."""
    slots.words[slot].view(2, 2, BLOCK_TOKENS, TOKEN_WORDS)[:, :, 0] = 0


@dataclass
class Forger:
    """Forges one block while it is swapped in, and notes whether a token is computed with it."""

    one: LateStorm
    forge: Forgery
    patience: int
    victim: Seq | None = None
    place: int = 0
    forged: torch.Tensor | None = None
    is_read: bool = False

    def strike(self, one: LateStorm, step: int) -> None:
        """Forge once: after ``patience`` steps, at an inbound copy while swap space has other blocks."""
        self.patience -= 1
        slots = one.slots
        if self.patience > 0 or self.forged is not None or not one.copies.coming or len({*slots.digests}) < 3:
            return
        job, moves = one.dice.choice(one.copies.coming), one.engine.loop.state.transfers
        index, move = one.dice.randrange(len(job.copy.slots)), moves[job.transfer_id].cargo
        assert move is not None
        slot = job.copy.slots[index]
        self.forge(slots, slot, one.dice)
        words = slots.words[slot].reshape(1, -1).numpy()
        slots.digests[slot] = compute_digests(words, compute_weights(words.shape[1]))[0]
        self.victim, self.place = move.seq, [*map(int, move.table)].index(job.copy.blocks[index])
        self.forged = slots.words[slot].clone()

    def watch(self, plan: StepPlan) -> None:
        """Note if this step samples a token of the victim with the forged block in its context."""
        seq = self.victim
        if seq is None or self.forged is None or seq.seq_id not in plan.sampled:
            return
        if seq.num_computed > self.place * BLOCK_TOKENS:
            first_token = self.one.pool_words(seq.blocks[self.place])[:, :TOKEN_WORDS]
            self.is_read |= torch.equal(first_token, self.forged[:, :TOKEN_WORDS])


def forge_in_a_storm(seed: int, forge: Forgery, requests: Sequence[Request]) -> tuple[Forger, LateStorm]:
    with late_storm(seed) as one:
        forger = Forger(one, forge, patience=3 + seed // 2)
        executor: Any = one.engine._executor
        execute = executor.execute

        def watched(plan: StepPlan) -> StepResult:
            forger.watch(plan)
            result: StepResult = execute(plan)
            return result

        executor.execute = watched
        stats = one.rage(requests, forger.strike)
    assert not any(stats.failed_transfers.values()), "a digest gave it away"
    return forger, one


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(6, 8, num_prefixes=2, num_own_tokens=60)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[Reference]:
    return run_calmly(requests, **FLAGS)


@pytest.mark.parametrize(
    ("forge", "share_of_tokens"),
    [(zeros, 0.5), (the_block_of_another_slot, 0.5), (its_tokens_one_place_further, 0.25), (a_forgotten_token, 0.0)],
)
def test_every_storm_notices_one_forged_block(
    forge: Forgery, share_of_tokens: float, requests: list[Request], expected: list[Reference]
) -> None:
    """Logprobs show it in all storms that compute a token with it; tokens in at least ``share_of_tokens``."""
    num_read = num_by_tokens = 0
    for seed in range(NUM_STORMS):
        forger, one = forge_in_a_storm(seed, forge, requests)
        if not forger.is_read:
            continue
        num_read += 1
        assert one.verdict(expected).wrong, f"storm {seed} noticed nothing"
        num_by_tokens += bool(judge(expected, list(one.outputs.values())).wrong)
    assert num_read > NUM_STORMS / 3
    assert num_by_tokens >= share_of_tokens * num_read
