"""A group that is brought to one of its states, for a fault of a chaos run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from floodplain.core.groups import GroupState
from tests.chaos.group_cluster import GroupCluster

S = GroupState
BEFORE = (S.PREPARING, S.DROPPING, S.EXCHANGING, S.SETTLING)
"""States of a drop."""
AFTER = (S.PLANNING, S.SHRINKING, S.FILLING, S.HANDOVER, S.RETURNING, S.ADOPTING, S.CLOSING)
"""States of a restore."""
STATES = (*BEFORE, S.PIPELINED, *AFTER)
WORDS = ("cancelled", "ended", "restored")
"""Ends of a group; see ``group_counts``."""
POINTS: Mapping[GroupState, str] = {
    S.PREPARING: "pause", S.DROPPING: "drop", S.EXCHANGING: "copy", S.SETTLING: "settle", S.PLANNING: "plan",
    S.SHRINKING: "move", S.FILLING: "fill", S.HANDOVER: "return", S.RETURNING: "return", S.ADOPTING: "copy",
    S.CLOSING: "close",
}  # fmt: skip
"""Points at which members wait, so that the group stays in a state; see ``group_hooks.py``."""


@dataclass(frozen=True, slots=True)
class Story:
    """A fault, and the state of the group in which it happens; in a merge the group takes in others."""

    fault: str
    state: GroupState
    is_merge: bool = False

    def __str__(self) -> str:
        return f"{self.fault} while {'a merge is ' * self.is_merge}{self.state}"


class Scene:
    """One story: a group is brought to the story's state, which lasts until ``let_go``. The cluster is in calm.

    In a merge all instances are members: a pair and a single one, or two pairs. ``pids`` are those of the members, once
    the group has been requested, the leader's first.
    """

    def __init__(self, cluster: GroupCluster, story: Story, random: Random) -> None:
        self.cluster, self.state, self.random = cluster, story.state, random
        rows = sorted(cluster.router.rows(), key=lambda row: row["slot"])
        members = random.sample(rows, len(rows) if story.is_merge else random.randint(2, len(rows)))
        self.pids = [row["pid"] for row in members]
        self._epochs = {row["pid"]: row["epoch"] for row in members}
        self._is_merge = story.is_merge
        self._old: dict[int, list[int]] = {}  # number -> pids of the members of groups that are taken in
        self._answer: Future[httpx.Response] | None = None
        self._entered: dict[str, int] = cluster.groups()["entered"]

    def begin(self) -> None:
        """Bring the group to its state."""
        if self.state in BEFORE:
            self._hold()
        if self.state is S.EXCHANGING:  # it is skipped without KV to exchange
            self.cluster.wait_for(self.has_running, "no member has a request")
        self._answer = self.ask_drop()
        self.wait_entered(self.state if self.state in BEFORE else S.PIPELINED)
        self._sort_members()
        if self.state in AFTER:
            self._hold()
            self.ask_restore().result()
            self.wait_entered(self.state)
        if self.state is not S.PIPELINED:
            self.cluster.wait_for(self.cluster.held, f"no member waits while {self.state}")

    def has_running(self) -> bool:
        """Whether a member runs a request, whose KV a change would move."""
        return any(row["running"] for row in self.cluster.router.rows() if row["pid"] in self.pids)

    def _hold(self) -> None:
        leader, others = self.pids[:1], self.pids[1:]
        pids = {S.PLANNING: leader, S.HANDOVER: leader, S.RETURNING: others}.get(self.state)
        if pids is None and POINTS[self.state] == "copy":
            pids = self.pids  # it is not known which of them have something to copy
        elif pids is None:
            pids = self.random.sample(self.pids, self.random.randint(1, len(self.pids)))
        self.cluster.hold(POINTS[self.state], self.random.choice(("before", "after")), pids)

    def _sort_members(self) -> None:
        """Sort the members by the order of the pipeline, which a merge chooses."""
        (group,) = self._new_groups()
        self.pids.sort(key=lambda pid: group["instances"].index(self._epochs[pid]))

    def _new_groups(self) -> list[Any]:
        return [row for row in self.cluster.groups()["groups"] if row["number"] not in self._old]

    def find_state(self) -> str | None:
        """Return the state of the story's group; None without it."""
        return next((row["state"] for row in self._new_groups()), None)

    def wait_entered(self, state: GroupState) -> None:
        """Return when the story's group, or the last of those that it takes in, has entered a state."""
        before = self._entered[state]
        self.cluster.wait_for(lambda: self.cluster.groups()["entered"][state] > before, f"the group is never {state}")

    def ask_drop(self, pids: Sequence[int] = ()) -> Future[httpx.Response]:
        """Ask for a group of these members, or of all."""
        return self.cluster.ask("drop", {"instances": [f"e{self._epochs[pid]}" for pid in pids or self.pids]})

    def ask_restore(self, pid: int = 0) -> Future[httpx.Response]:
        """Ask for a restore of this member's group, or of the leader's."""
        return self.cluster.ask("restore", {"instance": f"e{self._epochs[pid or self.pids[0]]}"})

    def draw_member(self, leads: bool) -> int:
        """Return the leader, or one of the others."""
        return int(self.pids[0] if leads else self.random.choice(self.pids[1:]))

    def is_awaited(self, pid: int) -> bool:
        """Whether the group cannot become SOLO, or drop, once the other members have answered."""
        return self.state not in (S.PREPARING, S.CLOSING) or pid in self.cluster.held()

    def expect_end(self, victim: int) -> None:
        """A member's death ends the group, or cancels it before the drop; then old groups of other members continue."""
        cluster, is_cancelled = self.cluster, self.state is S.PREPARING
        cluster.wait_for(lambda: self.find_state() is None, "the group lives on")
        assert self._answer is not None
        assert self._answer.result().status_code == (409 if is_cancelled else 200)
        alive = {number for number, pids in self._old.items() if is_cancelled and victim not in pids}
        self._expect_old(alive)
        num_ended = len(self._old) - len(alive) if is_cancelled else 1
        self._expect_changes(cancelled=int(is_cancelled), ended=num_ended)

    def _expect_old(self, numbers: Collection[int]) -> None:
        """Of the groups that were to be taken in, exactly these continue unchanged."""
        states = {row["number"]: row["state"] for row in self.cluster.groups()["groups"]}
        assert states == dict.fromkeys(numbers, S.PIPELINED), self.cluster.last_words()
        if states:
            self.cluster.wait_for_tokens()

    def _expect_changes(self, **changes: int) -> None:
        found = {word: self.cluster.change(word) - self._num[word] for word in WORDS}
        assert found == dict.fromkeys(WORDS, 0) | changes, self.cluster.last_words()

    def expect_refusal(self) -> None:
        """There is no new group, and old groups continue unchanged."""
        assert self.find_state() is None
        self._expect_old(self._old)

    def go_home(self) -> None:
        """The group continues, and is restored."""
        self.cluster.let_go()
        if self.state in (*BEFORE, S.PIPELINED):
            self.wait_entered(S.PIPELINED)
            assert self.ask_restore().result().status_code == 200
        self.cluster.wait_for(lambda: self.find_state() is None, "the group is never restored")
        self._expect_changes(restored=1)

    def play(self, fault: Callable[[Scene], None]) -> None:
        """Play the whole story."""
        if self._is_merge:
            self._make_old()
        self._num = {word: self.cluster.change(word) for word in WORDS}
        fault(self)
        self.cluster.let_go()
        for row in self.cluster.groups()["groups"]:
            if row["number"] in self._old:
                assert self.ask_restore(self._old[row["number"]][0]).result().status_code == 200
        self.cluster.wait_for_calm()

    def _make_old(self) -> None:
        """Make the groups that the story's group takes in."""
        for pids in (self.pids[:2], self.pids[2:]):
            if len(pids) == 1:
                continue
            number = self.ask_drop(pids).result().json()["number"]
            self.wait_entered(S.PIPELINED)
            self._entered = self.cluster.groups()["entered"]
            self._old[number] = pids
        self.cluster.wait_for_tokens()
