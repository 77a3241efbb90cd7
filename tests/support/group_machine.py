"""A state machine over groups in many processes, for laws of the router's book of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from floodplain.cluster.groups.table import GroupTable
from floodplain.core.groups import GroupState
from tests.support.group_laws import Edge
from tests.support.group_world import World

SEEDS = st.integers(0, 2**32)


class GroupMachine(RuleBasedStateMachine):
    """Groups of 2 to 4 side by side, in up to 7 processes."""

    book_type: Callable[[], GroupTable] = GroupTable
    reached: ClassVar[Counter[Edge]] = Counter()
    num_merged: ClassVar[int] = 0

    @initialize(num=st.integers(2, 6), num_requests=st.integers(0, 6))
    def begin(self, num: int, num_requests: int) -> None:
        self.world = World(type(self).book_type(), self.reached)
        for _ in range(num):
            self.world.join()
        for _ in range(num_requests):
            self.world.submit()

    @rule(seed=SEEDS, num=st.integers(1, 40))
    def work(self, seed: int, num: int) -> None:
        """Processes obey and copy, messages arrive: in any order between processes."""
        dice = Random(seed)
        for _ in range(num):
            if not self.world.step(dice, is_faulty=True):
                break
            self.world.check()

    @rule(seed=SEEDS)
    def prepare(self, seed: int) -> None:
        """Prepare a group of any instances; half of the time, of existing groups and others."""
        dice, world = Random(seed), self.world
        named = [epoch for group in world.table for epoch in group.epochs if group.state is GroupState.PIPELINED]
        named = [epoch for epoch in dict.fromkeys(named) if dice.random() < 0.9] if dice.random() < 0.5 else []
        others = [epoch for epoch in sorted(world.members) if epoch not in named]
        num = dice.choice([2, 2, 3, 4])
        if num <= len(world.members):
            world.prepare([*named, *dice.sample(others, max(0, min(num - len(named), len(others))))])

    @rule(seed=SEEDS)
    def restore(self, seed: int) -> None:
        self.world.restore(Random(seed).choice([0, *self.world.groups]))

    @precondition(lambda self: len(self.world.members) < 7)
    @rule()
    def join(self) -> None:
        self.world.join()

    @precondition(lambda self: len(self.world.places) < 8)
    @rule()
    def submit(self) -> None:
        self.world.submit()

    @precondition(lambda self: self.world.places)
    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self.world.abort(Random(seed).choice(sorted(self.world.places)))

    @precondition(lambda self: self.world.past)
    @rule(seed=SEEDS)
    def repeat(self, seed: int) -> None:
        dice = Random(seed)
        for _ in range(4):
            self.world.repeat(dice.choice(self.world.past))

    @rule(seed=SEEDS, what=st.sampled_from(["stop", "wake", "silence", "end"]))
    def fail(self, seed: int, what: str) -> None:
        """A process ends; or it stops, counts as dead, and resumes later under its old epoch."""
        dice, world = Random(seed), self.world
        if not world.members:
            return
        epoch = dice.choice(sorted(world.members))
        if what == "end":
            world.end(epoch)
        elif what == "stop":
            world.members[epoch].is_stopped = True
        elif what == "silence":
            for stopped in [one.epoch for one in world.members.values() if one.is_stopped]:
                world.end(stopped)
        elif what == "wake":
            for one in [*world.members.values(), *world.former]:
                one.is_stopped = False

    @rule(seed=SEEDS)
    def expire(self, seed: int) -> None:
        """A timer fires, perhaps late."""
        dice, world = Random(seed), self.world
        if not world.groups:
            return
        number = dice.choice(sorted(world.groups))
        if dice.random() < 0.2:
            world.apply(world.table.expire(number, GroupState.PREPARING))
        elif dice.random() < 0.2:
            world.apply(world.table.expire(number, world.groups[number].state))
        else:
            state = dice.choice(list(GroupState))
            assert state is world.groups[number].state or world.table.expire(number, state) is None

    @rule(seed=SEEDS)
    def turmoil(self, seed: int) -> None:
        """Many random events: a change of a group takes some thirty messages."""
        dice, world = Random(seed), self.world
        for _ in range(dice.randrange(200)):
            self.world.step(dice, is_faulty=True)
            world.check()
            if dice.random() < 0.1:
                what = dice.choice([self.prepare, self.prepare, self.restore, self.restore, self.abort, self.repeat])
                if dice.random() < 0.1:
                    self.fail(dice.getrandbits(32), dice.choice(["stop", "silence", "wake", "end"]))
                elif dice.random() < 0.1:
                    self.expire(dice.getrandbits(32))
                elif len(world.members) < 4:
                    self.join()
                elif len(world.places) < 6:
                    self.submit()
                elif world.past and world.groups:
                    what(dice.getrandbits(32))
                world.check()

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Without faults every group ends, one more runs to its end, and every request is served."""
        if not hasattr(self, "world"):
            return
        world, dice = self.world, Random(len(self.world.past))
        for one in [one.epoch for one in world.members.values() if one.is_stopped]:
            world.end(one)
        while len(world.members) < 2:
            world.join()
        world.settle(dice)
        for group in world.table:
            world.restore(group.number)
        world.settle(dice)
        world.finish(dice)
        type(self).num_merged += world.num_merged


def run(machine: type[GroupMachine], num_examples: int, *, derandomize: bool = False) -> None:
    """Run a machine for this many stories; ``derandomize``: the same ones each time."""
    few = settings(
        max_examples=num_examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=derandomize,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=few)  # type: ignore[no-untyped-call]
