"""Stages that join, link and end in any order: a pipeline is whole or ended, and no epoch is in two."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodplain.cluster.pipeline.forming import Pipeline, PipelineTable
from tests.support.examples import examples


class World:
    """Processes, one for each stage, that join under new epochs, and the pipelines that the router must have."""

    def __init__(self, num_stages: int, table: PipelineTable) -> None:
        self.table, self.num_stages = table, num_stages
        self.stage_of: dict[int, int] = {}  # of live epochs
        self.formed: dict[int, Pipeline] = {}
        self.serving: set[int] = set()
        self.next_epoch = 1

    def join(self, stage: int) -> None:
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        older = self.table.join(epoch, stage)
        self.stage_of[epoch] = stage
        pipeline = self.table.form()
        if older is not None:
            assert self.stage_of[older] == stage and not any(older in one.epochs for one in self.formed.values())
            self.end(older)
        if pipeline is not None:
            assert pipeline.number not in self.formed
            assert [self.stage_of[member] for member in pipeline.epochs] == list(range(self.num_stages))
            self.formed[pipeline.number] = pipeline

    def link(self, epoch: int, number: int) -> None:
        pipeline = self.table.link(epoch, number)
        if pipeline is not None:
            assert pipeline.number not in self.serving and set(pipeline.linked) == set(pipeline.epochs)
            assert all(member in self.stage_of for member in pipeline.epochs)
            self.serving.add(pipeline.number)

    def end(self, epoch: int) -> None:
        """End an epoch, then the epochs that end with it, as the router does."""
        if self.stage_of.pop(epoch, None) is None:
            return
        for other in self.table.end(epoch):
            self.end(other)

    def check(self) -> None:
        self.table.check_integrity()
        for pipeline in list(self.formed.values()):
            living = [member in self.stage_of for member in pipeline.epochs]
            assert all(living) or not any(living), "a member goes on alone"
            if not all(living):
                del self.formed[pipeline.number]
                self.serving.discard(pipeline.number)


def tell(seed: int, num_stages: int, table: PipelineTable) -> int:
    """Run random events; return how many pipelines served."""
    world, dice, num_served = World(num_stages, table), Random(seed), 0
    for _ in range(150):
        event = dice.choice(["join", "join", "link", "link", "link", "end"])
        epochs = list(range(1, world.next_epoch)) or [1]  # ended ones may send messages, too
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
    tell(seed, num_stages, PipelineTable(num_stages))


def test_pipelines_serve_in_these_stories() -> None:
    assert sum(tell(seed, 2, PipelineTable(2)) for seed in range(10)) > 100


# -- negative controls -------------------------------------------------------------------------------------------------


class LetsMembersGoOn(PipelineTable):
    def end(self, epoch: int) -> list[int]:
        super().end(epoch)
        return []


class FormsTooSoon(PipelineTable):
    def link(self, epoch: int, number: int) -> Pipeline | None:
        super().link(epoch, number)
        return self._pipelines.get(number)


@pytest.mark.parametrize("kind", [LetsMembersGoOn, FormsTooSoon])
def test_a_table_is_noticed_that(kind: type[PipelineTable]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            tell(seed, 2, kind(2))
