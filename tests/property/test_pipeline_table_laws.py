"""Stages that join, link and end in any order: a pipeline is whole or ended, and no epoch is in two."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.pipeline.forming import Forming, Pipeline
from floodplain.cluster.state.roster import Roster
from floodplain.cluster.wire.messages import Formed, StageFacts
from floodplain.core.errors import UserError
from floodplain.cost.model_shape import SHAPES
from floodplain.cost.pipeline import ChunkPrice, StageMemory, cost_by_shape, head_layers, split_layers
from tests.support.cluster_peers import FACTS
from tests.support.examples import examples


class World:
    """Processes, one for each stage, that join under new epochs, and the pipelines that the router must have."""

    def __init__(self, num_stages: int, kind: type[Forming]) -> None:
        self.roster, self.num_stages = Roster(1.0), num_stages
        self.forming = kind(num_stages, self.roster, lambda epoch, form: None)
        self.stage_of: dict[int, int] = {}  # of live epochs
        self.formed: dict[int, Pipeline] = {}
        self.serving: set[int] = set()
        self.last_epoch = 0

    def join(self, stage: int) -> None:
        instance = self.roster.join(FACTS, None, 0.0, StageFacts(stage, self.num_stages, "host", 1))
        older, self.last_epoch = self.forming.join(instance), instance.epoch
        self.stage_of[instance.epoch] = stage
        if older is not None:
            assert self.stage_of[older] == stage and not any(older in one.epochs for one in self.formed.values())
            self.end(older)
        for pipeline in self.forming.pipelines:
            if pipeline.number not in self.formed:
                assert [self.stage_of[member] for member in pipeline.epochs] == list(range(self.num_stages))
                self.formed[pipeline.number] = pipeline

    def link(self, epoch: int, number: int) -> None:
        if self.forming.link(Formed(epoch, number)):
            pipeline = self.formed[number]
            assert number not in self.serving and set(pipeline.linked) == set(pipeline.epochs)
            assert all(member in self.stage_of for member in pipeline.epochs)
            self.serving.add(number)

    def end(self, epoch: int) -> None:
        """End an epoch, then the epochs that end with it, as the router does."""
        if self.roster.remove(epoch) is None:
            return
        del self.stage_of[epoch]
        for other in self.forming.end(epoch):
            self.end(other)

    def check(self) -> None:
        self.forming.check_integrity()
        for pipeline in list(self.formed.values()):
            living = [member in self.stage_of for member in pipeline.epochs]
            assert all(living) or not any(living), "a member goes on alone"
            if not all(living):
                del self.formed[pipeline.number]
                self.serving.discard(pipeline.number)


def tell(seed: int, num_stages: int, kind: type[Forming] = Forming) -> int:
    """Run random events; return how many pipelines served."""
    world, dice, num_served = World(num_stages, kind), Random(seed), 0
    for _ in range(150):
        event = dice.choice(["join", "join", "link", "link", "link", "end"])
        epochs = list(range(1, world.last_epoch + 1)) or [1]  # ended ones may send messages, too
        if event == "join":
            world.join(dice.randrange(num_stages))
        elif event == "link":
            numbers = [*world.formed, 1, 99]
            number = dice.choice(numbers)
            members = world.formed[number].epochs if number in world.formed else epochs
            world.link(dice.choice([*members, *epochs[-2:]]), number)
        elif dice.random() < 0.4:
            world.end(dice.choice(epochs))
        world.check()
        num_served += len(world.serving)
    return num_served


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), num_stages=st.integers(2, 4))
def test_a_pipeline_is_whole_or_over(seed: int, num_stages: int) -> None:
    tell(seed, num_stages)


def test_pipelines_serve_in_these_stories() -> None:
    assert sum(tell(seed, 2) for seed in range(10)) > 100


# -- negative controls -------------------------------------------------------------------------------------------------


class LetsMembersGoOn(Forming):
    def end(self, epoch: int) -> list[int]:
        super().end(epoch)
        return []


class FormsTooSoon(Forming):
    def link(self, message: Formed) -> bool:
        super().link(message)
        return message.number in self._pipelines


@pytest.mark.parametrize("kind", [LetsMembersGoOn, FormsTooSoon])
def test_a_table_is_noticed_that(kind: type[Forming]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            tell(seed, 2, kind)


# -- layers cut into stages --------------------------------------------------------------------------------------------


MEMORIES = st.builds(StageMemory, st.integers(0, 4000), st.integers(1, 60), st.integers(1, 9))


def all_cuts(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[b - a for a, b in pairwise((0, *cut, num_layers))] for cut in cuts]


def dearest(counts: list[int], head_cost: float) -> float:
    return max(*counts[:-1], counts[-1] + head_cost) if counts[:-1] else counts[-1] + head_cost


@settings(max_examples=examples(150))
@given(
    num_layers=st.integers(1, 10),
    memories=st.lists(MEMORIES, min_size=1, max_size=4),
    head_cost=st.sampled_from([0.0, 0.5, 1.0, 2.83, 8.0]),
    slack=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
)
def test_no_cut_as_even_has_more_blocks_and_none_with_as_many_is_more_even(
    num_layers: int, memories: list[StageMemory], head_cost: float, slack: float
) -> None:
    if num_layers < len(memories):
        with pytest.raises(UserError, match=f"{num_layers} layers cannot be a pipeline of {len(memories)} stages"):
            split_layers(num_layers, memories, head_cost, slack)
        return

    def blocks(counts: list[int]) -> int:
        return min(memory.count_blocks(count) for memory, count in zip(memories, counts, strict=True))

    stages = split_layers(num_layers, memories, head_cost, slack)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    found = [len(stage) for stage in stages]
    cuts = all_cuts(num_layers, len(memories))
    limit = (1 + slack) * min(dearest(counts, head_cost) for counts in cuts) + 1e-6
    even = [counts for counts in cuts if dearest(counts, head_cost) <= limit]
    assert dearest(found, head_cost) <= limit
    most = max(map(blocks, even))
    assert blocks(found) == most
    best = min(dearest(counts, head_cost) for counts in even if blocks(counts) == most)
    assert dearest(found, head_cost) == pytest.approx(best)


def cut_smollm2(slack: float) -> list[int]:
    shape = SHAPES["smollm2-135m"]
    block_bytes = 2 * shape.kv_size * 4 * 16
    memory = StageMemory(30 * (512 * block_bytes + shape.layer_bytes(4)), shape.layer_bytes(4), block_bytes)
    return [len(stage) for stage in split_layers(30, [memory, memory], head_layers(shape), slack)]


def test_the_head_of_a_small_model_weighs_eight_layers() -> None:
    assert head_layers(SHAPES["smollm2-135m"]) == pytest.approx(8.0, abs=0.01)
    assert head_layers(SHAPES["qwen2.5-14b"]) == pytest.approx(2.83, abs=0.01)
    assert cut_smollm2(0.0) == [19, 11] and cut_smollm2(0.1) == [18, 12] and cut_smollm2(0.5) == [15, 15]


def test_a_chunk_costs_the_same_however_it_is_cut() -> None:
    price = ChunkPrice(cost_by_shape(SHAPES["smollm2-135m"]))
    assert price(100, 30) + price(130, 70) == pytest.approx(price(100, 100))
    assert price(0, 1) == pytest.approx(1.0, abs=0.001)
