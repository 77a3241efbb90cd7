"""Groups merge under live requests: the tokens are those of one engine, also if a member ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from floodplain.cluster.bulk.kv_copies import Puller
from floodplain.cluster.groups.plan import GroupPlan
from floodplain.core.groups import GroupState
from floodplain.engine.config import EngineConfig
from tests.support import router_process
from tests.support.group_in_process import PENALTIES, Ring, ring

MODEL, NUM_TOKENS = "dummy:tiny-deep", 120
NUM_LASTING = 300
"""Length of the streams: none finishes before the last change of the groups, also if changes are slow."""
FLAGS = {"dtype": "float32", "kv_memory": 2**22, "max_model_len": 384, "max_batched_tokens": 512}
PROMPTS = [[(3 + 7 * number + 5 * place) % 256 for place in range(40 + 3 * number)] for number in range(10)]


@cache
def expected() -> list[list[int]]:
    """Tokens of one engine."""
    return router_process.one_engine(MODEL, PROMPTS, {**FLAGS, "kv_memory": 2**25}, max_tokens=NUM_TOKENS, **PENALTIES)


async def group(one: Ring, *groups: list[int]) -> int:
    """Form these groups in order, each once every stream has gained a token; return the last one's number.

    Streams do not wait for each other: the first ones would end meanwhile, and no KV of theirs would be carried.
    """
    number = 0
    for epochs in groups:
        before = list(one.counts)
        await one.until(lambda before=before: all(now > then for now, then in zip(one.counts, before, strict=True)))  # type: ignore[misc]
        number = one.group_controller.drop(epochs)
        await one.change(number, GroupState.PIPELINED)
    return number


def on_ring(folder: Path, play: Callable[[Ring], Any]) -> tuple[list[list[int]], int, int]:
    """Play with four instances; (first tokens of all, number of carried requests, number of recomputed ones)."""

    async def story() -> tuple[list[list[int]], int, int]:
        async with ring(EngineConfig(model=MODEL, **FLAGS), 4, folder) as one:  # type: ignore[arg-type]
            one.ask(PROMPTS, NUM_LASTING)
            await play(one)
            outputs = await one.first_results(NUM_TOKENS)
            counts = one.group_controller.counts
            await one.until(lambda: len(one.router.table.roster) == 4)
            for member in one.members:
                member.memory.check_integrity()
            return outputs, counts.num_carried, counts.num_recomputed

    return asyncio.run(story())


@pytest.mark.parametrize(
    "groups, most_layers", [(([1, 2], [3, 4], [4, 3, 2, 1]), 3), (([1, 2], [2, 1, 3], [4, 2, 1, 3]), 4)]
)
def test_groups_merge_and_restore_with_the_kv_of_all_requests(
    folder: Path, groups: tuple[list[int], ...], most_layers: int
) -> None:
    async def play(one: Ring) -> None:
        number = await group(one, *groups)
        plan = one.group_controller.plan_of(number)
        assert plan is not None and max(map(len, plan.kept)) == most_layers
        assert [each.number for each in one.group_controller.groups] == [number]
        carried.append(one.group_controller.counts.num_carried)
        one.group_controller.restore(number)
        await one.change(number, GroupState.SOLO)
        sizes = {member.pool.num_blocks for member in one.members}
        assert sizes == {80}

    carried: list[int] = []
    outputs, num_carried, num_recomputed = on_ring(folder, play)
    assert outputs == expected()
    assert carried[0] >= 2 * len(PROMPTS) and num_carried >= carried[0] + len(PROMPTS) // 2 and num_recomputed == 0


@pytest.mark.parametrize("state", [GroupState.PREPARING, GroupState.EXCHANGING], ids=str)
def test_a_member_may_end_in_a_merge(folder: Path, state: GroupState) -> None:
    """If it ends in PREPARING, the other group is kept; in EXCHANGING, no group is left."""

    async def play(one: Ring) -> None:
        await group(one, [1, 2], [3, 4])
        enter = one.group_controller._enter

        def end_then(plan: GroupPlan, entered: GroupState) -> None:
            enter(plan, entered)
            if plan.number == 3 and entered is state:
                asyncio.get_running_loop().call_soon(one.router._end, 2, "hung_up")

        one.group_controller._enter = end_then  # type: ignore[method-assign]
        one.group_controller.drop([1, 2, 3, 4])
        await one.until(lambda: one.group_controller.counts.num_changes["ended"])
        assert [each.number for each in one.group_controller.groups] == ([2] if state is GroupState.PREPARING else [])

    assert on_ring(folder, play)[0] == expected()


def test_a_merge_that_copies_no_kv_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(one: Ring) -> None:
        await group(one, [1, 2], [3, 4])
        monkeypatch.setattr(Puller, "copy", lambda self, request, write: True)
        await group(one, [1, 2, 3, 4])

    assert on_ring(folder, play)[0] != expected()
