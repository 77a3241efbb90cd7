"""A drop under swap pressure: requests in swap space go on with their KV, and the tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from floodplain.cluster.bulk.kv_copies import SwapStore
from floodplain.core.groups import GroupState
from floodplain.engine.config import EngineConfig
from tests.support import router_process
from tests.support.group_in_process import PENALTIES, Ring, ring

MODEL, NUM_TOKENS = "dummy:tiny-deep", 36
FLAGS = {"dtype": "float32", "kv_memory": 2**20, "max_model_len": 128, "max_batched_tokens": 256, "policy": "fair"}
"""One quantum of KV: parameters, and so a group's gain, are large beside it. ``fair`` ranks by work, not by time."""
PROMPTS = [[(3 + 7 * number + 5 * place) % 256 for place in range(40 + number)] for number in range(28)]
NUM_SWAPPED = 16


@cache
def expected() -> list[list[int]]:
    """Tokens of one engine with room for all requests."""
    return router_process.one_engine(MODEL, PROMPTS, {**FLAGS, "kv_memory": 2**25}, max_tokens=NUM_TOKENS, **PENALTIES)


def run(folder: Path, prepare: Callable[[Ring], None] = lambda _: None) -> tuple[list[list[int]], int, int, int]:
    """Group four instances, most of whose requests are in swap space.

    Returns:
        (all tokens, number of requests with KV, of those that kept it, of those with KV in swap space).
    """

    async def story() -> tuple[list[list[int]], int, int, int]:
        async with ring(EngineConfig(model=MODEL, **FLAGS), 4, folder) as one:  # type: ignore[arg-type]
            one.ask(PROMPTS, NUM_TOKENS)
            await one.until(lambda: sum(count_swapped(one)) >= NUM_SWAPPED)
            prepare(one)
            number = one.group_controller.drop([1, 2, 3, 4])
            plan = one.group_controller.plan_of(number)
            await one.change(number, GroupState.PIPELINED)
            assert plan is not None
            rows = [row for report, _ in plan.reports.values() for row in report.rows if row.num_blocks]
            num_swapped = sum(any(source < 0 for source in each.sources) for each in plan.moving.values())
            outputs = await one.results()
            for member in one.members:
                member.memory.check_integrity()
            return outputs, len(rows), one.group_controller.counts.num_carried, num_swapped

    return asyncio.run(story())


def count_swapped(one: Ring) -> list[int]:
    return [len(member.engine.engine.loop.state.swapped) for member in one.members]


SIGN = -(2**31)


def damage(one: Ring, where: tuple[int | slice, ...] = (7, 5)) -> None:
    """Flip a sign in a slot that requests will need, in each member, once its engine rests: of (layer, word)."""

    def flip(swap: SwapStore, address: str) -> None:
        plan = one.group_controller.plan_of(1)
        assert plan is not None and plan.sizes is not None
        place = [report.bulk_address for report, _ in map(plan.reports.__getitem__, plan.epochs)].index(address)
        slot = next(slot for at, slot in plan.sizes.slot_blocks if at == place)
        swap._slots.words[(slot, *where)] ^= SIGN

    for member in one.members:
        assert member.swap is not None
        member.swap.forget = partial(flip, member.swap, member.bulk.address)  # type: ignore[method-assign]


def test_requests_in_swap_space_keep_their_kv_in_a_drop(folder: Path) -> None:
    outputs, num_rows, num_carried, num_swapped = run(folder)
    assert outputs == expected()
    assert num_carried >= num_rows - 2 and num_swapped >= NUM_SWAPPED - 2 > num_rows // 2 - 2


def test_requests_with_a_damaged_slot_are_computed_again(folder: Path) -> None:
    outputs, num_rows, num_carried, _ = run(folder, damage)
    assert outputs == expected()
    assert num_rows - 10 < num_carried <= num_rows - 4


# -- negative controls -------------------------------------------------------------------------------------------------


def test_damage_that_is_not_looked_for_is_in_the_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapStore, "_prove", lambda self, slots: True)
    assert run(folder, partial(damage, where=(slice(None),)))[0] != expected()
