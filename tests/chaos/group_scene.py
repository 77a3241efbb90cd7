"""A group that is led to one of its states, where a fault of a chaos run is to strike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random

import httpx

from floodplain.core.groups import GroupState
from tests.chaos.group_cluster import GroupCluster

S = GroupState
BEFORE = (S.PREPARING, S.DROPPING, S.EXCHANGING, S.SETTLING)
"""States of a drop."""
AFTER = (S.PLANNING, S.SHRINKING, S.FILLING, S.HANDOVER, S.RETURNING, S.ADOPTING, S.CLOSING)
"""States of a restore."""
STATES = (*BEFORE, S.PIPELINED, *AFTER)
POINTS: Mapping[GroupState, str] = {
    S.PREPARING: "pause", S.DROPPING: "drop", S.EXCHANGING: "copy", S.SETTLING: "settle", S.PLANNING: "plan",
    S.SHRINKING: "move", S.FILLING: "fill", S.HANDOVER: "return", S.RETURNING: "return", S.ADOPTING: "copy",
    S.CLOSING: "close",
}  # fmt: skip
"""Where members wait so that the group stays in a state; see ``group_hooks.py``."""


@dataclass(frozen=True, slots=True)
class Story:
    """A fault, and the state of the group in which it strikes."""

    fault: str
    state: GroupState

    def __str__(self) -> str:
        return f"{self.fault} while {self.state}"


class Scene:
    """One story as it is played: a group is led to the story's state, which lasts until ``let_go``.

    Args:
        cluster: In calm.
        state: Where the fault is to strike.
        random: Draws all that is left open.

    Attributes:
        pids: Of the members, the leader's first.
    """

    def __init__(self, cluster: GroupCluster, state: GroupState, random: Random) -> None:
        self.cluster, self.state, self.random = cluster, state, random
        rows = sorted(cluster.front.rows(), key=lambda row: row["slot"])
        members = random.sample(rows, random.randint(2, len(rows)))
        self.pids = [row["pid"] for row in members]
        self._names = [f"e{row['epoch']}" for row in members]
        self._answer: Future[httpx.Response] | None = None

    def begin(self) -> None:
        """Lead the group to its state."""
        if self.state in BEFORE:
            self._hold()
        self._answer = self.ask_drop()
        if self.state not in BEFORE:
            self.wait_in(S.PIPELINED)
        if self.state in AFTER:
            self._hold()
            self.ask_restore().result()
        if self.state is not S.PIPELINED:
            self.wait_in(self.state)
            self.cluster.wait_for(self.cluster.held, f"no member waits while {self.state}")

    def _hold(self) -> None:
        leader, others = self.pids[:1], self.pids[1:]
        pids = {S.PLANNING: leader, S.HANDOVER: leader, S.RETURNING: others}.get(self.state)
        if pids is None and POINTS[self.state] == "copy":
            pids = self.pids  # which of them have something to copy is not known
        elif pids is None:
            pids = self.random.sample(self.pids, self.random.randint(1, len(self.pids)))
        self.cluster.hold(POINTS[self.state], self.random.choice(("before", "after")), pids)

    def wait_in(self, state: GroupState) -> None:
        self.cluster.wait_for(lambda: self.cluster.state() == state, f"the group is never {state}")

    def ask_drop(self) -> Future[httpx.Response]:
        return self.cluster.ask("drop", {"instances": self._names})

    def ask_restore(self) -> Future[httpx.Response]:
        return self.cluster.ask("restore", {"instance": self._names[0]})

    def draw_member(self, leads: bool) -> int:
        """The leader, or one of the others."""
        return int(self.pids[0] if leads else self.random.choice(self.pids[1:]))

    def expect_end(self) -> None:
        """A member's death ends the group: before the drop it was never made."""
        cluster, word = self.cluster, "cancelled" if self.state is S.PREPARING else "ended"
        cluster.wait_for(lambda: cluster.state() is None, "the group lives on")
        assert self._answer is not None
        assert self._answer.result().status_code == (409 if self.state is S.PREPARING else 200)
        assert cluster.change(word) == self._num[word] + 1

    def go_home(self) -> None:
        """Nothing has ended the group: it goes on, and is restored."""
        self.cluster.let_go()
        if self.state in (*BEFORE, S.PIPELINED):
            self.wait_in(S.PIPELINED)
            assert self.ask_restore().result().status_code == 200
        self.cluster.wait_for(lambda: self.cluster.state() is None, "the group is never restored")
        assert self.cluster.change("restored") == self._num["restored"] + 1, self.cluster.last_words()

    def play(self, fault: Callable[[Scene], None]) -> None:
        """All of it."""
        self._num = {word: self.cluster.change(word) for word in ("cancelled", "ended", "restored")}
        fault(self)
        self.cluster.let_go()
        self.cluster.wait_for_calm()
