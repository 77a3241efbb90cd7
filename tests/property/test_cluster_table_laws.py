"""The router's table under joins, deaths, stops, and late or repeated messages: no wrong token, no lost request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from floodplain.cluster.state.request_table import MAX_FAILED_PLACEMENTS, Entry, RequestTable
from floodplain.cluster.state.roster import Roster
from floodplain.cluster.wire.messages import InstanceFacts
from floodplain.core.request import Request
from tests.support.loops import make_request, next_token, reference_output

FACTS = InstanceFacts("1", "f", "float32", 64, 4, 12, "host", 1)
SILENCE_S = 1.0
MAX_MODEL_LEN = 64


@dataclass
class Said:
    """A message on its way to the router; it may arrive late, twice, or never."""

    epoch: int
    ticket: int
    token: int | None


@dataclass
class FakeInstance:
    """An instance's process: it acts on the orders it received, whatever state the router has recorded."""

    epoch: int
    is_stopped: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)


class BookMachine(RuleBasedStateMachine):
    """Requests arrive; instances compute, exit, stop and resume; messages arrive in any order between instances."""

    @initialize()
    def begin(self) -> None:
        self.table = RequestTable(Roster(SILENCE_S))
        self.now = 0.0
        self.processes: dict[int, FakeInstance] = {}
        self.zombies: list[FakeInstance] = []
        self.wire: list[Said] = []
        self.past: list[Said] = []
        self.live: dict[int, Entry] = {}
        self.outputs: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.ended: dict[int, str] = {}
        self.join()

    # -- instances -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.processes) < 4)
    @rule()
    def join(self) -> None:
        one = self.table.roster.join(FACTS, None, self.now)
        assert one.epoch not in self.processes and all(one.epoch != zombie.epoch for zombie in self.zombies)
        self.processes[one.epoch] = FakeInstance(one.epoch)
        self.place()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        """An instance's connection ends; its earlier messages may or may not have arrived."""
        epoch = data.draw(st.sampled_from(sorted(self.processes)))
        self.bury(epoch)
        del self.processes[epoch]

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def stop(self, data: Any) -> None:
        self.processes[data.draw(st.sampled_from(sorted(self.processes)))].is_stopped = True

    @rule()
    def pass_time(self) -> None:
        """Running instances send beats; a stopped one misses its beats, is ended, and may resume with its old epoch."""
        for _ in range(7):
            self.now += SILENCE_S / 4
            for epoch, one in self.processes.items():
                if not one.is_stopped:
                    assert self.table.roster.hear(epoch, self.now)
            for epoch in self.table.roster.find_silent(self.now):
                assert self.processes[epoch].is_stopped
                self.bury(epoch)
                self.zombies.append(self.processes.pop(epoch))
        assert not any(one.is_stopped for one in self.processes.values())

    @precondition(lambda self: any(zombie.tokens for zombie in self.zombies))
    @rule()
    def wake(self) -> None:
        """A stopped instance resumes from its old state: it sends more tokens in its old epoch."""
        zombie = next(zombie for zombie in self.zombies if zombie.tokens)
        for ticket, tokens in zombie.tokens.items():
            tokens.append(next_token(tuple(tokens)))
            self.wire.append(Said(zombie.epoch, ticket, tokens[-1]))
        zombie.tokens.clear()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.processes)))
        self.table.roster.expect(epoch).is_leaving = True

    def bury(self, epoch: int) -> None:
        for entry in self.table.end(epoch):
            if not self.table.give_back(entry):
                assert entry.num_failed_placements >= MAX_FAILED_PLACEMENTS
                self.finish(entry, "given up")
        assert self.table.end(epoch) == []
        self.place()

    # -- requests --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 6)
    @rule(
        prompt=st.lists(st.integers(0, 22), min_size=1, max_size=9).map(tuple),
        max_tokens=st.integers(1, 9),
        priority=st.sampled_from([0, 0, 1]),
    )
    def submit(self, prompt: tuple[int, ...], max_tokens: int, priority: int) -> None:
        request = replace(
            make_request("r", prompt, self.now, max_tokens=max_tokens, ignore_eos=True), priority=priority
        )
        entry = self.table.open(request)
        self.live[entry.number], self.outputs[entry.number] = entry, []
        self.requests[entry.number] = request
        self.place()

    def place(self) -> None:
        for entry in self.table.place():
            assert entry.epoch is not None and entry.ticket is not None
            assert not self.table.roster.expect(entry.epoch).is_leaving
            known = entry.as_request()
            assert list(known.known_token_ids) == self.outputs[entry.number]
            self.processes[entry.epoch].tokens[entry.ticket] = [*known.prompt_token_ids, *known.known_token_ids]

    @precondition(lambda self: any(one.tokens and not one.is_stopped for one in self.processes.values()))
    @rule(data=st.data())
    def compute(self, data: Any) -> None:
        """One step of one instance: each of its requests gets a token, unless one of them is given back."""
        busy = sorted(epoch for epoch, one in self.processes.items() if one.tokens and not one.is_stopped)
        one = self.processes[data.draw(st.sampled_from(busy))]
        for ticket, tokens in one.tokens.items():
            tokens.append(next_token(tuple(tokens)))
            self.wire.append(Said(one.epoch, ticket, tokens[-1]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hang_up(self, data: Any) -> None:
        entry = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        where = self.table.close(entry)
        assert self.table.close(entry) is None
        if where is not None:
            self.processes[where[0]].tokens.pop(where[1], None)
        self.finish(entry, "hung up")
        self.place()

    @precondition(lambda self: self.live and self.processes)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        entry = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if entry.epoch is None or self.outputs[entry.number]:
            return
        self.processes[entry.epoch].tokens.pop(entry.ticket or 0, None)
        if not self.table.refuse(entry):
            self.finish(entry, "refused")
        self.place()

    # -- messages --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.wire)
    @rule(is_repeated=st.booleans(), num=st.integers(1, 5))
    def deliver(self, is_repeated: bool, num: int) -> None:
        """Deliver in the order of each connection; a repeated old message stands for a forged peer."""
        for said in self.wire[:num]:
            self.hear(said)
        self.past += self.wire[:num]
        del self.wire[:num]
        if is_repeated:
            for said in self.past:
                if said.epoch not in self.processes:
                    self.hear(said)

    def hear(self, said: Said) -> None:
        entry = self.find(said)
        if entry is None or said.token is None:
            return
        self.table.take(entry, said.token)
        self.outputs[entry.number].append(said.token)
        if len(self.outputs[entry.number]) == entry.request.params.max_tokens:
            assert entry.epoch is not None and entry.ticket is not None
            self.processes[entry.epoch].tokens.pop(entry.ticket, None)
            self.table.close(entry)
            self.finish(entry, "done")
        self.place()

    def find(self, said: Said) -> Entry | None:
        return self.table.find(said.epoch, said.ticket)

    def finish(self, entry: Entry, how: str) -> None:
        del self.live[entry.number]
        self.ended[entry.number] = how

    # -- laws ------------------------------------------------------------------------------------------------------

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.live)
        epochs = {one.epoch for one in self.table.roster}
        open_epochs = {one.epoch for one in self.table.roster if not one.is_leaving}
        for entry in self.live.values():
            may_wait = entry.is_suspect and all(
                any(other.is_suspect for other in self.table.entries_of(epoch).values())
                for epoch in open_epochs - entry.refused_by
            )
            assert entry.epoch in epochs or not open_epochs or may_wait

    @invariant()
    def suspects_are_on_different_instances(self) -> None:
        for one in self.table.roster:
            assert sum(entry.is_suspect for entry in self.table.entries_of(one.epoch).values()) <= 1

    @invariant()
    def no_token_is_wrong(self) -> None:
        for number, output in getattr(self, "outputs", {}).items():
            wanted = reference_output(self.requests[number], MAX_MODEL_LEN)
            assert output == wanted[: len(output)]
            if self.ended.get(number) == "done":
                assert output == wanted

    def teardown(self) -> None:
        """Join one more instance: every live request ends with its reference tokens."""
        for epoch in list(self.processes):
            self.bury(epoch)
            del self.processes[epoch]
        self.join()
        (one,) = self.processes.values()
        while self.live:
            assert one.tokens
            for ticket, tokens in list(one.tokens.items()):
                tokens.append(next_token(tuple(tokens)))
                self.hear(Said(one.epoch, ticket, tokens[-1]))
            self.no_token_is_wrong()
        self.table.check_integrity()
        assert len(self.table) == 0 == sum(one.num_demanded_blocks for one in self.table.roster)


@given(num_instances=st.integers(1, 4), num_requests=st.integers(1, 12), data=st.data())
def test_a_request_that_ends_its_instances_fails_alone(num_instances: int, num_requests: int, data: Any) -> None:
    """It ends each instance in its first step there, before any request has a token of that step."""
    table = RequestTable(Roster(SILENCE_S))
    for _ in range(num_instances):
        table.roster.join(FACTS, None, 0.0)
    requests = [make_request("r", (number,), 0.0, max_tokens=2) for number in range(num_requests)]
    entries = [table.open(request) for request in requests]
    cause = data.draw(st.sampled_from(entries))
    num_ends, given_up = 0, list[Entry]()
    while len(table):
        table.place()
        one = data.draw(st.sampled_from([one for one in table.roster if one.tickets]))
        placed = list(table.entries_of(one.epoch).values())
        if cause in placed:
            num_ends += 1
            given_up += [entry for entry in table.end(one.epoch) if not table.give_back(entry)]
            table.roster.join(FACTS, None, 0.0)
        else:
            for entry in placed:
                table.take(entry, 1)
                if len(entry.tokens) == 2:
                    table.close(entry)
        table.check_integrity()
    assert (given_up, num_ends) == ([cause], MAX_FAILED_PLACEMENTS)


class TrustfulMachine(BookMachine):
    """Negative control: a router that accepts any message about one of its requests, from any instance."""

    def __init__(self) -> None:
        super().__init__()
        self.by_ticket: dict[int, Entry] = {}

    def place(self) -> None:
        super().place()
        for entry in self.live.values():
            if entry.ticket is not None:
                self.by_ticket[entry.ticket] = entry

    def find(self, said: Said) -> Entry | None:
        entry = self.by_ticket.get(said.ticket)
        return entry if entry is not None and entry.number in self.live and entry.epoch is not None else None


TestBook = BookMachine.TestCase


def test_a_router_that_accepts_old_epochs_is_noticed() -> None:
    """Negative control: a hand-written run in which a stopped instance resumes and sends tokens of a moved request."""
    wrong = []
    for machine in (BookMachine(), TrustfulMachine()):
        machine.begin()
        machine.submit((1, 2, 3), 9, 0)
        first = machine.processes[1]
        for ticket, tokens in first.tokens.items():
            tokens.append(next_token(tuple(tokens)))
            machine.wire.append(Said(1, ticket, tokens[-1]))
        first.is_stopped = True
        machine.join()
        machine.pass_time()
        machine.deliver(False, 5)  # its late messages: the request continues elsewhere without them
        (two,) = machine.processes.values()
        for ticket, tokens in two.tokens.items():
            tokens.append(next_token(tuple(tokens)))
            machine.wire.append(Said(two.epoch, ticket, tokens[-1]))
        machine.deliver(False, 5)
        (output,) = machine.outputs.values()
        wrong.append(output != reference_output(machine.requests[1], MAX_MODEL_LEN)[: len(output)])
    assert wrong == [False, True]
