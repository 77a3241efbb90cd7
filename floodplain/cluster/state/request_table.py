"""The router's table: each live request, its tokens so far, and its placement. No I/O, no clock.

A request is placed under a ticket, which is used once. A message of an instance counts only if its epoch is live and
the ticket is the current one of the request: late messages of a dead, stopped or slow instance change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from floodplain.cluster.state.roster import Instance, Roster
from floodplain.cluster.wire.messages import InstanceFacts
from floodplain.core.codec import WireError
from floodplain.core.errors import InvariantError
from floodplain.core.hashing import BlockKey, extend_keys, root_key
from floodplain.core.request import Request
from floodplain.policy.dispatch import InstanceView, choose_instance

MAX_FAILED_PLACEMENTS = 3
"""A request fails if so many instances in a row ended under it without a new token: it may be the cause."""

SUSPECT_PLACEMENTS = MAX_FAILED_PLACEMENTS - 1
"""A request under which so many instances ended is a suspect. It is placed where no other suspect is: if one of them
ends instances, the others get a token elsewhere, and do not fail with it. Its KV never moves to a chosen instance."""

MAX_PREFIX_BLOCKS = 256
"""Most blocks of a prompt that are hashed to compare instances: hashing a whole long prompt would block the router."""


@dataclass(eq=False, slots=True)
class Entry:
    """A live request, as it arrived at the router.

    Attributes:
        number: The order of arrival.
        epoch: Of the instance that it is placed on, under ``ticket``; both None while it waits for an instance.
        refused_by: Epochs of instances that refused it since it was last placed elsewhere.
        num_moves: How often it was given back, or was lifted and had to ``wait``.
        num_failed_placements: Instances that ended or gave it back since its last token, without leaving ones.
    """

    request: Request
    number: int
    tokens: list[int] = field(default_factory=list)
    epoch: int | None = None
    ticket: int | None = None
    refused_by: set[int] = field(default_factory=set)
    num_moves: int = 0
    num_failed_placements: int = 0
    keys: list[BlockKey] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        """Whether it may be why instances ended: no token refutes it yet."""
        return self.num_failed_placements >= SUSPECT_PLACEMENTS

    @property
    def num_tokens(self) -> int:
        """The number of known tokens: prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def as_request(self) -> Request:
        """The request that an instance resumes: with its tokens so far."""
        return replace(self.request, known_token_ids=tuple(self.tokens), is_accepted=self.num_moves > 0)


class RequestTable:
    """The requests of a router, and their placements on the instances of its roster."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._placed: dict[int, Entry] = {}
        self._unplaced: dict[int, Entry] = {}
        self._lifted: dict[int, Entry] = {}
        self._next_number = self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._placed) + len(self._unplaced) + len(self._lifted)

    @property
    def num_unplaced(self) -> int:
        """The number of live requests that wait for an instance."""
        return len(self._unplaced)

    def entries(self) -> list[Entry]:
        """All live requests."""
        return [*self._placed.values(), *self._unplaced.values(), *self._lifted.values()]

    # -- requests --------------------------------------------------------------------------------------------------

    def open(self, request: Request) -> Entry:
        """Add a request; ``place`` finds an instance for it."""
        entry = Entry(request, self._next_number)
        self._next_number += 1
        self._unplaced[entry.number] = entry
        return entry

    def close(self, entry: Entry) -> tuple[int, int] | None:
        """End a request. (epoch, ticket) if it was placed: the instance may have to abort it. Safe to call twice."""
        self._unplaced.pop(entry.number, None)
        self._lifted.pop(entry.number, None)
        where = None if entry.epoch is None or entry.ticket is None else (entry.epoch, entry.ticket)
        self._take_back(entry)
        return where

    def place(self) -> list[Entry]:
        """Place waiting requests by priority and arrival; return them. A suspect waits while each instance has one."""
        placed = []
        if self._unplaced and any(one.takes_requests for one in self.roster):
            for entry in sorted(self._unplaced.values(), key=lambda one: (one.request.priority, one.number)):
                epoch = choose_instance(self._views(entry), self.count_blocks(entry))
                if epoch is not None:
                    self._put(entry, self.roster.expect(epoch))
                    placed.append(entry)
        return placed

    def find(self, epoch: int, ticket: int) -> Entry | None:
        """The request of a ticket of this instance; None if messages about it no longer count."""
        entry = self._placed.get(ticket)
        return entry if entry is not None and entry.epoch == epoch and self.roster.get(epoch) else None

    def check_ticket(self, epoch: int, ticket: int) -> None:
        """Raise ``WireError`` unless the ticket was issued and is not placed on another instance."""
        entry = self._placed.get(ticket)
        if not 0 < ticket < self._next_ticket or (entry is not None and entry.epoch != epoch):
            raise WireError("it speaks of a request that it was never given")

    def take(self, entry: Entry, token: int) -> None:
        """Append a token to a placed request."""
        instance = self.roster.expect(entry.epoch or 0)
        before = self.count_blocks(entry)
        entry.tokens.append(token)
        entry.num_failed_placements = 0
        instance.num_demanded_blocks += self.count_blocks(entry) - before

    def refuse(self, entry: Entry) -> bool:
        """Take off a refused request. True if another instance may accept it: it then waits to be placed."""
        if entry.epoch is not None:
            entry.refused_by.add(entry.epoch)
        self._take_back(entry)
        others = {one.epoch for one in self.roster if one.takes_requests} - entry.refused_by
        if others:
            self._unplaced[entry.number] = entry
        return bool(others)

    def give_back(self, entry: Entry) -> bool:
        """Take off a request that its instance cannot continue. True if it waits to be placed again."""
        if entry.epoch is not None and not self.roster.expect(entry.epoch).is_leaving:
            entry.num_failed_placements += 1  # a live instance might give it back forever
        self._take_back(entry)
        entry.num_moves += 1
        if entry.num_failed_placements >= MAX_FAILED_PLACEMENTS:
            return False
        entry.refused_by.clear()
        self._unplaced[entry.number] = entry
        return True

    def lift(self, entry: Entry) -> None:
        """Take a request off its instance to move it with its KV; then ``put`` it on another, or let it ``wait``.

        A suspect must ``wait`` at once.
        """
        self._take_back(entry)
        self._lifted[entry.number] = entry

    def put(self, entry: Entry, epoch: int) -> None:
        """Place a lifted request on the instance of ``epoch``."""
        del self._lifted[entry.number]
        self._unplaced[entry.number] = entry
        self._put(entry, self.roster.expect(epoch))

    def wait(self, entry: Entry) -> None:
        """Let a lifted request wait for any instance: it is recomputed from its tokens."""
        del self._lifted[entry.number]
        entry.num_moves += 1
        entry.refused_by.clear()
        self._unplaced[entry.number] = entry

    def is_lifted(self, entry: Entry) -> bool:
        """Whether the request is lifted: neither placed, nor waiting, nor ended."""
        return entry.number in self._lifted

    def entries_of(self, epoch: int) -> dict[int, Entry]:
        """The requests that are placed on an instance, by ticket."""
        return {ticket: self._placed[ticket] for ticket in sorted(self.roster.expect(epoch).tickets)}

    def end(self, epoch: int) -> list[Entry]:
        """End an instance's session. Its requests, which are no longer placed; give back each."""
        instance = self.roster.remove(epoch)
        if instance is None:
            return []
        entries = [self._placed.pop(ticket) for ticket in sorted(instance.tickets)]
        for entry in entries:
            entry.epoch = entry.ticket = None
            entry.num_failed_placements += not instance.is_leaving
        return entries

    # -- inside ----------------------------------------------------------------------------------------------------

    def _views(self, entry: Entry) -> Iterable[InstanceView]:
        keys, num_choices = self._keys_of(entry), self._count_choices(entry.request.choice_group)
        return [
            InstanceView(
                one.epoch,
                one.num_blocks,
                one.num_demanded_blocks,
                len(one.tickets),
                one.prefixes.count_known(keys),
                num_choices[one.epoch],
            )
            for one in self.roster
            if one.takes_requests and one.epoch not in entry.refused_by and not self._has_rival(one, entry)
        ]

    def _has_rival(self, instance: Instance, entry: Entry) -> bool:
        """Whether the entry is a suspect, and another one is on the instance."""
        return entry.is_suspect and any(self._placed[ticket].is_suspect for ticket in instance.tickets)

    def _count_choices(self, group: int) -> Counter[int | None]:
        placed = self._placed.values() if group else ()
        return Counter([other.epoch for other in placed if other.request.choice_group == group])

    def _put(self, entry: Entry, instance: Instance) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        del self._unplaced[entry.number]
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
        """Blocks of the request's known tokens and of the next one."""
        return entry.num_tokens // self._expect_facts().block_tokens + 1

    def _keys_of(self, entry: Entry) -> list[BlockKey]:
        facts, request = self._expect_facts(), entry.request
        if not entry.keys:
            num_full = min(len(request.prompt_token_ids) // facts.block_tokens, MAX_PREFIX_BLOCKS)
            root = root_key(facts.fingerprint, request.cache_salt)
            extend_keys(entry.keys, root, request.prompt_token_ids, num_full, facts.block_tokens)
        return entry.keys

    def _expect_facts(self) -> InstanceFacts:
        if self.roster.first_facts is None:
            raise InvariantError("a request is placed before an instance has joined")
        return self.roster.first_facts

    def check_integrity(self) -> None:
        """Raise ``InvariantError`` unless every live request is in exactly one state."""
        for instance in self.roster:
            entries = [self._placed[ticket] for ticket in instance.tickets]
            if any(entry.epoch != instance.epoch for entry in entries):
                raise InvariantError("a ticket is another instance's")
            if instance.num_demanded_blocks != sum(map(self.count_blocks, entries)):
                raise InvariantError(f"the demand of epoch {instance.epoch} is not its requests'")
        if len(self._placed) != sum(len(one.tickets) for one in self.roster):
            raise InvariantError("a request is placed on an instance that is gone")
        if any(entry.ticket is not None for entry in [*self._unplaced.values(), *self._lifted.values()]):
            raise InvariantError("a request waits for an instance, and has one")
        if not self._unplaced.keys().isdisjoint(self._lifted):
            raise InvariantError("a lifted request waits for an instance")
        if any(entry.is_suspect for entry in self._lifted.values()):
            raise InvariantError("a suspect moves with its KV, perhaps to an instance with another one")
