"""Groups whose members obey late, refuse, end, stop and resume: every layer has a copy, no request is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
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

from floodplain.cluster.groups.table import Change, Fetch, Fetches, Group, GroupTable
from floodplain.cluster.wire import group_messages as wire
from floodplain.cluster.wire.group_messages import STEPS, Answer
from floodplain.core.errors import InvariantError, UserError
from floodplain.core.groups import GroupState
from tests.support.examples import examples
from tests.support.group_laws import Edge
from tests.support.group_world import World

# -- a state machine over groups in many processes, for laws of the router's book of groups ----------------------------


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
        if world.groups and dice.random() < 0.25:
            world.apply(world.table.expire(dice.choice(sorted(world.groups))))

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
        self.world.check()

    def teardown(self) -> None:
        """Without faults every group ends, one more runs to its end, and every request is served."""
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


def test_groups_end_whole_under_any_order_of_messages_and_faults() -> None:
    class Machine(GroupMachine):
        reached: ClassVar[Counter[Edge]] = Counter()

    run(Machine, examples(100), derandomize=True)
    assert {end for _, end in Machine.reached} == set(GroupState), "these stories are too tame"
    assert Machine.num_merged > 2, "too few groups are merged"


def make_world(
    table: GroupTable, seed: int, num_members: int, *groups: list[int], num_requests: int = 0
) -> tuple[World, Random]:
    """A world in which these groups are pipelines, and its dice."""
    world, dice = World(table), Random(seed)
    for _ in range(num_members):
        world.join()
    for _ in range(num_requests):
        world.submit()
    for epochs in groups:
        world.prepare(epochs)
        world.settle(dice)
    return world, dice


def reach(world: World, number: int, state: GroupState, dice: Random) -> Group:
    """The group, when it has reached ``state``."""
    group = world.groups[number]
    while group.state is not state:
        if group.state is GroupState.PIPELINED:
            world.restore(number)
        world.step(dice, is_faulty=False)
    return group


def expect_all_served(world: World, dice: Random, num_requests: int) -> None:
    """One more instance joins, the groups restore, and no request is lost."""
    world.join()
    world.settle(dice)
    for group in world.table:
        world.restore(group.number)
    world.settle(dice)
    world.finish(dice)
    assert len(world.places) == num_requests


@pytest.mark.parametrize("state", list(STEPS), ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_member_may_end_in_every_state(state: GroupState, size: int) -> None:
    for place in range(size):
        world, dice = make_world(GroupTable(), place, size + 1, num_requests=9)
        world.prepare(list(range(1, size + 1)))
        group = reach(world, 1, state, dice)
        for _ in range(dice.randrange(3)):
            world.step(dice, is_faulty=False)
        goes_on = group.state in (GroupState.PREPARING, GroupState.SOLO)
        world.end(group.epochs[place])
        others = set(range(1, size + 2)) - {group.epochs[place]}
        assert set(world.members) == (others if goes_on else {size + 1})
        expect_all_served(world, dice, 9)


@pytest.mark.parametrize("state", list(STEPS), ids=str)
def test_member_may_end_in_every_state_of_a_merge(state: GroupState) -> None:
    """Two groups merge into one: until all members have confirmed, the group without the victim continues."""
    for victim in (1, 2, 4):
        world, dice = make_world(GroupTable(), victim, 5, [1, 2], [3, 4], num_requests=9)
        world.prepare([1, 2, 3, 4])
        assert [old.number for old in world.groups[3].old] == [1, 2]
        reach(world, 3, state, dice)
        world.end(victim)
        others = {3, 4} if victim < 3 else {1, 2}
        assert set(world.members) == ({5, *others} if state is GroupState.PREPARING else {5})
        expect_all_served(world, dice, 9)


# -- negative controls -------------------------------------------------------------------------------------------------


class DropsAtOnce(GroupTable):
    """Sends drop orders together with prepare orders: one phase instead of two."""

    def prepare(self, epochs: Any) -> Change:
        change = super().prepare(epochs)
        return replace(change, orders=change.orders + tuple(replace(one, kind=wire.Drop) for one in change.orders))


class DropsWhenOneConfirms(GroupTable):
    def note(self, epoch: int, number: int, answer: Answer) -> Change | None:
        change = super().note(epoch, number, answer)
        if change is not None and answer is Answer.CONFIRMED:
            change.group.answered = set(change.group.epochs)
        return change


class LetsOthersGoOn(GroupTable):
    def end(self, epoch: int) -> Change | None:
        change = super().end(epoch)
        return None if change is None else replace(change, ended=())


class ForgetsToCancel(GroupTable):
    def refuse(self, epoch: int, number: int) -> Change | None:
        change = super().refuse(epoch, number)
        return None if change is None else replace(change, orders=())


class BelievesOldNumbers(GroupTable):
    def note(self, epoch: int, number: int, answer: Answer) -> Change | None:
        group = self.find(epoch)
        return super().note(epoch, number if group is None else group.number, answer)


class TakesPartsOfGroups(GroupTable):
    """Lets a member of a group join another one, which leaves its pipeline without a stage."""

    def find_old(self, epochs: Any) -> list[Group]:
        found = {group.number: group for epoch in epochs if (group := self.find(epoch)) is not None}
        if any(group.state is not GroupState.PIPELINED for group in found.values()):
            raise UserError("not now")
        return list(found.values())


class ForgetsOldGroups(GroupTable):
    """Removes the old groups when a merge is cancelled."""

    def refuse(self, epoch: int, number: int) -> Change | None:
        change = super().refuse(epoch, number)
        for old in () if change is None else change.group.old:
            self._groups.pop(old.number, None)
        return change


class LeavesOneCopyOut(GroupTable):
    """Leaves one member out of the copies of each swapped request's KV."""

    def drop(self, number: int, copiers: Any) -> Change:
        return super().drop(number, {one: sorted(epochs)[:-1] or epochs for one, epochs in copiers.items()})


FAULTS = {
    DropsAtOnce: "before all have confirmed",
    DropsWhenOneConfirms: "before all have confirmed|in two places",
    LetsOthersGoOn: "goes on|lacks|before all have confirmed",
    ForgetsToCancel: "left in a group",
    BelievesOldNumbers: "is believed|waits for none",
    LeavesOneCopyOut: "goes on without its KV",
}


@pytest.mark.parametrize("table", FAULTS)
def test_faulty_table_is_found(table: type[GroupTable]) -> None:
    class Machine(GroupMachine):
        book_type = table

    with pytest.raises(AssertionError, match=FAULTS[table]):
        run(Machine, 200, derandomize=True)


def test_a_part_of_a_group_that_joins_another_one_is_found() -> None:
    world, dice = make_world(TakesPartsOfGroups(), 1, 3, [1, 2])
    change = world.table.prepare([1, 3])
    world.groups[2], world.kept[2] = change.group, {1: frozenset({0, 1}), 3: frozenset({2, 3})}
    with pytest.raises(AssertionError, match="lacks layers"):
        world.apply(change)
        world.settle(dice)


def test_an_old_group_that_is_forgotten_is_found() -> None:
    world, dice = make_world(ForgetsOldGroups(), 1, 3, [1, 2])
    world.prepare([1, 3, 2])
    with pytest.raises(AssertionError, match="lacks layers"):
        world.apply(world.table.refuse(3, 2))
        world.settle(dice)


def test_blocks_freed_under_a_copy_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Fetches.answer

    def answer_at_once(self: Fetches, request: int, epoch: int, *, is_ok: bool) -> Fetch | None:
        fetch = answer(self, request, epoch, is_ok=is_ok)
        if fetch is not None and fetch.epochs:
            del self._fetches[request]
            return Fetch(set(), fetch.to, has_failed=True)
        return fetch

    monkeypatch.setattr(Fetches, "answer", answer_at_once)
    with pytest.raises(AssertionError, match="a copy is under way"):
        run(GroupMachine, 200)


# -- examples ----------------------------------------------------------------------------------------------------------


def test_an_instance_is_in_one_group_of_two_to_four() -> None:
    table = GroupTable()
    for epochs in ([1], [1, 1], [1, 2, 3, 4, 5]):
        with pytest.raises(UserError, match="2 to 4"):
            table.prepare(epochs)
    table.prepare([1, 2])
    with pytest.raises(UserError, match="group 1 is preparing: try again"):
        table.prepare([3, 2])
    assert table.expire(1) is not None and table.prepare([3, 2]).group.number == 2


def test_a_group_is_taken_in_as_a_whole_and_not_restored_meanwhile() -> None:
    world, _ = make_world(GroupTable(["none", "one", "two", "three"].__getitem__), 1, 5, [1, 2])
    for epochs, others in (
        ([1, 3], "instances two, too"),
        ([2, 1], r"other instances beside them \(cluster restore ends it\)"),
    ):
        with pytest.raises(UserError, match=f"^instances one, two are group 1: name {others}$"):
            world.table.prepare(epochs)
    number = world.table.prepare([1, 3, 2]).group.number
    with pytest.raises(UserError, match="group 1 is about to join group 2"):
        world.table.restore(1)
    assert world.table.expire(number) is not None
    assert world.table.restore(1).group.state is GroupState.PLANNING


def test_restore_in_the_middle_of_a_change_is_refused_in_one_line() -> None:
    table = GroupTable()
    number = table.prepare([1, 2]).group.number
    with pytest.raises(UserError, match="group 1 is preparing"):
        table.restore(number)
    with pytest.raises(UserError, match="no group 7"):
        table.restore(7)


def test_router_cannot_drop_before_all_have_confirmed() -> None:
    table = GroupTable()
    table.prepare([1, 2])
    table.note(1, 1, Answer.CONFIRMED)
    with pytest.raises(InvariantError):
        table.drop(1, {})
    table.note(2, 1, Answer.CONFIRMED)
    with pytest.raises(InvariantError, match="no member"):
        table.drop(1, {5: {3}})
    with pytest.raises(InvariantError, match="by no member"):
        table.drop(1, {5: set()})
    assert [order.kind for order in table.drop(1, {}).orders] == [wire.Drop, wire.Drop]
