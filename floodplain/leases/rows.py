"""The rows of a lease book other than leases, and its replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from floodplain.core.ranges import ADDED, ITEMS, Line, Pattern
from floodplain.leases.states import IDENTITY, Deadline, Lease, LeaseId, Name, Number, Outcome, SentNumber, Stamp


@dataclass(frozen=True, slots=True)
class Member:
    """A process, of an engine or any other program, that lends or borrows; named after the device it computes on.

    Attributes:
        instance: Drawn by the process at its start, so that joining twice is joining once; empty after its end.
        generation: Its incarnation: one more whenever a new instance joins.
        revision: How often its offer has changed, or a consumer was found to have allocated on the device.
        offered_bytes: Leased bytes included.
        last_request: The number of its last request that was granted, in this generation.
        is_gone: The last process of that name has ended, and its device is gone: what is owed there is settled at once.
        is_lender: This life began with a producer's token, or has offered bytes: a consumer may not send its messages.
        hidden_bytes: The most bytes that consumers may still hold under ended leases: expired ones that an observation
            settled while their bytes were attributed to another consumer, which was dead or had not reported yet.
    """

    name: Name
    instance: Annotated[str, Pattern(r"[!-~]{0,128}")]
    generation: Number = 1
    revision: Number = 1
    offered_bytes: int = 0
    last_request: int = 0
    is_gone: bool = False
    is_lender: Annotated[bool, ADDED] = False
    hidden_bytes: Annotated[int, ADDED] = 0

    @property
    def stamp(self) -> Stamp:
        """Return generation and revision of the row."""
        return Stamp(self.generation, self.revision)


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes that must be on one device: the named one, or any."""

    num_bytes: SentNumber
    producer: Name | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a message, and the rows as they are now: from them a late sender learns the present state.

    Attributes:
        member: The row of the member that it was about.
        leases: The leases that it was about, or that it changed.
        due_in_s: For recalled leases, the seconds that their consumers have left.
        detail: One line for a log, or empty.
    """

    outcome: Outcome
    member: Member | None = None
    leases: tuple[Lease, ...] = ()
    due_in_s: Annotated[Mapping[Annotated[LeaseId, IDENTITY], Deadline], ITEMS] = field(default_factory=dict)
    detail: Line = ""
