"""The rows of a lease book beside leases, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from floodplain.leases.states import Lease, LeaseId, Outcome, Stamp


@dataclass(frozen=True, slots=True)
class Member:
    """One engine process, or any program, that lends, borrows, or both; named as the device that it computes on.

    Attributes:
        name: Of the device; of the program, if it has none to lend.
        instance: What the process drew at its start, so that joining twice is joining once; empty after its end.
        generation: Its incarnation: one more whenever it joins.
        revision: How often what it lends has changed, or somebody has said that it allocated on the device.
        offered_bytes: What it has put up, leased bytes included.
        last_request: The number of its last request that was granted, in this generation.
        is_gone: The last process of that name has ended, and the device with it. Nobody looks there any more, and no
            pool needs what is owed there: it is settled at once.
        is_lender: A producer's token has begun this life, or it has put bytes up: who may only borrow may not speak for
            it.
        hidden_bytes: Consumers may still hold so many bytes of the device, at most, under leases that have ended: under
            expired ones that a look settled while a consumer that had died, or had not reported yet, was taken to hold
            what they held.
    """

    name: str
    instance: str
    generation: int = 1
    revision: int = 1
    offered_bytes: int = 0
    last_request: int = 0
    is_gone: bool = False
    is_lender: bool = False
    hidden_bytes: int = 0

    @property
    def stamp(self) -> Stamp:
        """The row as it stands."""
        return Stamp(self.generation, self.revision)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a request: bytes that must be on one device.

    Attributes:
        num_bytes: How many.
        producer: On whose device; None if any will do.
    """

    num_bytes: int
    producer: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a message, and the rows as they are now: whoever was late learns from them.

    Attributes:
        outcome: What became of it.
        member: The row of the member that it was about.
        leases: The leases that it was about, or that it changed.
        due_in_s: For those that are recalled, the seconds that their consumers have left.
        detail: One line for whoever reads a log, empty if there is nothing to say.
    """

    outcome: Outcome
    member: Member | None = None
    leases: tuple[Lease, ...] = ()
    due_in_s: Mapping[LeaseId, float] = field(default_factory=dict)
    detail: str = ""
