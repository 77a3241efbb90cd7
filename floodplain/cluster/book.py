"""The front's book: each live request with its tokens so far, and where it is placed. No I/O, no clock.

A request is placed under a ticket, which is used once. What an instance says counts only if its epoch lives and the
ticket is the request's current one: whatever a dead, stopped or slow instance says later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from floodplain.cluster.facts import InstanceFacts, StageFacts
from floodplain.cluster.roster import Instance, Roster
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey, extend_keys, root_key
from floodplain.core.request import Request
from floodplain.lending.fields import WireError
from floodplain.policy.dispatch import InstanceView, choose_instance

MAX_FRUITLESS = 3
"""A request is given up if so many instances in a row ended under it without a new token: it may be the cause."""

MAX_PREFIX_BLOCKS = 256
"""Blocks of a prompt by which instances are compared: hashing all of a long one would hold the front up."""


@dataclass(eq=False, slots=True)
class Entry:
    """A live request.

    Attributes:
        request: As it arrived at the front.
        number: The order of arrival.
        tokens: What was generated so far.
        epoch: Of the instance that it is placed on, and
        ticket: under which; both None while it waits for an instance.
        refused_by: Epochs of instances that refused it since it was last placed elsewhere.
        num_moves: Instances that ended, or gave it back, under it.
        num_fruitless: Instances that ended under it since its last token, but for those that were leaving.
    """

    request: Request
    number: int
    tokens: list[int] = field(default_factory=list)
    epoch: int | None = None
    ticket: int | None = None
    refused_by: set[int] = field(default_factory=set)
    num_moves: int = 0
    num_fruitless: int = 0
    keys: list[BlockKey] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def as_request(self) -> Request:
        """What an instance is to go on with."""
        return replace(self.request, known_token_ids=tuple(self.tokens), is_accepted=self.num_moves > 0)


class Book:
    """See the module.

    Args:
        roster: The instances.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._placed: dict[int, Entry] = {}
        self._homeless: dict[int, Entry] = {}
        self._lifted: dict[int, Entry] = {}
        self._next_number = self._next_ticket = 1
        self._facts: InstanceFacts | None = None

    def __len__(self) -> int:
        """Live requests."""
        return len(self._placed) + len(self._homeless) + len(self._lifted)

    @property
    def num_homeless(self) -> int:
        """Live requests that wait for an instance."""
        return len(self._homeless)

    def join(self, facts: InstanceFacts, slot: int | None, now: float, stage: StageFacts | None = None) -> Instance:
        """An instance begins a life; of the first one all others must be like (``find_difference``)."""
        self._facts = self._facts or facts
        return self.roster.join(facts, slot, now, stage)

    # -- requests --------------------------------------------------------------------------------------------------

    def open(self, request: Request) -> Entry:
        """A request arrives; ``place`` finds an instance for it."""
        entry = Entry(request, self._next_number)
        self._next_number += 1
        self._homeless[entry.number] = entry
        return entry

    def close(self, entry: Entry) -> tuple[int, int] | None:
        """A request ends, however: (epoch, ticket) if an instance may have to be told. Safe to call twice."""
        self._homeless.pop(entry.number, None)
        self._lifted.pop(entry.number, None)
        where = None if entry.epoch is None or entry.ticket is None else (entry.epoch, entry.ticket)
        self._take_back(entry)
        return where

    def place(self) -> list[Entry]:
        """Place whom an instance can be found for, by priority and arrival; those are returned, to be sent there."""
        placed = []
        if self._homeless and any(one.takes_requests for one in self.roster):
            for entry in sorted(self._homeless.values(), key=lambda one: (one.request.priority, one.number)):
                epoch = choose_instance(self._views(entry), self.count_blocks(entry))
                if epoch is not None:
                    self._put(entry, self.roster.expect(epoch))
                    placed.append(entry)
        return placed

    def find(self, epoch: int, ticket: int) -> Entry | None:
        """The request that an instance speaks of; None if what it says does not count any more."""
        entry = self._placed.get(ticket)
        return entry if entry is not None and entry.epoch == epoch and self.roster.get(epoch) else None

    def check_ticket(self, epoch: int, ticket: int) -> None:
        """Check that an instance may speak of a ticket: it was given out, and not to another instance.

        Raises:
            WireError: It may not.
        """
        entry = self._placed.get(ticket)
        if not 0 < ticket < self._next_ticket or (entry is not None and entry.epoch != epoch):
            raise WireError("it speaks of a request that it was never given")

    def take(self, entry: Entry, token: int) -> None:
        """A placed request got its next token."""
        instance = self.roster.expect(entry.epoch or 0)
        before = self.count_blocks(entry)
        entry.tokens.append(token)
        entry.num_fruitless = 0
        instance.num_demanded_blocks += self.count_blocks(entry) - before

    def refuse(self, entry: Entry) -> bool:
        """Its instance does not take it. Whether another may: it then waits to be placed there."""
        if entry.epoch is not None:
            entry.refused_by.add(entry.epoch)
        self._take_back(entry)
        others = {one.epoch for one in self.roster if one.takes_requests} - entry.refused_by
        if others:
            self._homeless[entry.number] = entry
        return bool(others)

    def give_back(self, entry: Entry) -> bool:
        """Its instance cannot go on with it. Whether another shall: it then waits to be placed there."""
        if entry.epoch is not None and not self.roster.expect(entry.epoch).is_leaving:
            entry.num_fruitless += 1  # one that lives gives it back: it might do so for ever
        self._take_back(entry)
        entry.num_moves += 1
        if entry.num_fruitless >= MAX_FRUITLESS:
            return False
        entry.refused_by.clear()
        self._homeless[entry.number] = entry
        return True

    def lift(self, entry: Entry) -> None:
        """Take a request off its instance, which goes on elsewhere with its KV: ``put`` it there, or ``wait``."""
        self._take_back(entry)
        self._lifted[entry.number] = entry

    def put(self, entry: Entry, epoch: int) -> None:
        """Place a lifted request on a certain instance."""
        del self._lifted[entry.number]
        self._homeless[entry.number] = entry
        self._put(entry, self.roster.expect(epoch))

    def wait(self, entry: Entry) -> None:
        """Let a lifted request wait for any instance: it is computed again from its tokens."""
        del self._lifted[entry.number]
        entry.num_moves += 1
        entry.refused_by.clear()
        self._homeless[entry.number] = entry

    def is_lifted(self, entry: Entry) -> bool:
        """Whether it was lifted, and is neither placed since nor waits nor has ended."""
        return entry.number in self._lifted

    def entries_of(self, epoch: int) -> dict[int, Entry]:
        """The requests that are placed on an instance, by ticket."""
        return {ticket: self._placed[ticket] for ticket in sorted(self.roster.expect(epoch).tickets)}

    def end(self, epoch: int) -> list[Entry]:
        """An instance's life ends: its requests, none of which is placed now. Each is to be given back."""
        instance = self.roster.remove(epoch)
        if instance is None:
            return []
        entries = [self._placed.pop(ticket) for ticket in sorted(instance.tickets)]
        for entry in entries:
            entry.epoch = entry.ticket = None
            entry.num_fruitless += not instance.is_leaving
        return entries

    # -- inside ----------------------------------------------------------------------------------------------------

    def _views(self, entry: Entry) -> Iterable[InstanceView]:
        keys = self._keys_of(entry)
        return [
            InstanceView(
                one.epoch, one.num_blocks, one.num_demanded_blocks, len(one.tickets), one.prefixes.count_known(keys)
            )
            for one in self.roster
            if one.takes_requests and one.epoch not in entry.refused_by
        ]

    def _put(self, entry: Entry, instance: Instance) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        del self._homeless[entry.number]
        entry.epoch, entry.ticket = instance.epoch, ticket
        self._placed[ticket] = entry
        instance.tickets.add(ticket)
        instance.num_demanded_blocks += self.count_blocks(entry)
        instance.prefixes.note(entry.keys)

    def _take_back(self, entry: Entry) -> None:
        if entry.ticket is not None and entry.epoch is not None:
            del self._placed[entry.ticket]
            instance = self.roster.expect(entry.epoch)
            instance.tickets.remove(entry.ticket)
            instance.num_demanded_blocks -= self.count_blocks(entry)
            entry.epoch = entry.ticket = None

    def count_blocks(self, entry: Entry) -> int:
        """Blocks of its known tokens and the next one."""
        return entry.num_tokens // self._expect_facts().block_tokens + 1

    def _keys_of(self, entry: Entry) -> list[BlockKey]:
        facts, request = self._expect_facts(), entry.request
        if not entry.keys:
            num_full = min(len(request.prompt_token_ids) // facts.block_tokens, MAX_PREFIX_BLOCKS)
            root = root_key(facts.fingerprint, request.cache_salt)
            extend_keys(entry.keys, root, request.prompt_token_ids, num_full, facts.block_tokens)
        return entry.keys

    def _expect_facts(self) -> InstanceFacts:
        if self._facts is None:
            raise InvariantError("a request is placed before an instance has joined")
        return self._facts

    def check_integrity(self) -> None:
        """Check that every live request is in one place.

        Raises:
            InvariantError: It is not.
        """
        for instance in self.roster:
            entries = [self._placed[ticket] for ticket in instance.tickets]
            if any(entry.epoch != instance.epoch for entry in entries):
                raise InvariantError("a ticket is another instance's")
            if instance.num_demanded_blocks != sum(map(self.count_blocks, entries)):
                raise InvariantError(f"the demand of epoch {instance.epoch} is not its requests'")
        if len(self._placed) != sum(len(one.tickets) for one in self.roster):
            raise InvariantError("a request is placed on an instance that is gone")
        if any(entry.ticket is not None for entry in [*self._homeless.values(), *self._lifted.values()]):
            raise InvariantError("a request waits for an instance, and has one")
        if not self._homeless.keys().isdisjoint(self._lifted):
            raise InvariantError("a lifted request waits for an instance")
