"""Messages of the router and two instances during a migration; ``cluster.migration.table`` has the protocol.

Every message names the migration by its number, which is used once. Block ids are sent beside a message, 32 bits each.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.cluster.wire.placements import Submit
from floodplain.core.ranges import HostPort, Secret


@dataclass(frozen=True, slots=True)
class HoldKv:
    """To the source: hold the request's sealed blocks, and let the target read them. Answered by ``KvHeld``.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        ticket: Of the request.
        num_copied: Leading blocks that the target has.
        secret: The secret that the target will show, hexadecimal.
    """

    epoch: int
    number: int
    ticket: int
    num_copied: int
    secret: Secret


@dataclass(frozen=True, slots=True)
class PullKv:
    """To the target: copy the blocks beside the message from the source. Answered by ``KvPulled``.

    Attributes:
        epoch: Of the target.
        number: Of the migration.
        address: Of the source's bulk server, ``HOST:PORT``.
        secret: The secret that the source admits, hexadecimal.
    """

    epoch: int
    number: int
    address: HostPort
    secret: Secret


@dataclass(frozen=True, slots=True)
class StopRequest:
    """To the source: end the request, and hold all of its blocks. Answered by ``RequestStopped``.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        num_copied: Leading blocks that the target has.
    """

    epoch: int
    number: int
    num_copied: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """To source or target: resume the request from the blocks that are there. Its tokens are beside the message.

    Attributes:
        epoch: Of the instance.
        number: Of the migration, which ends for this instance.
        num_computed: Leading tokens whose KV is there.
        submit: The request, as in any placement.
    """

    epoch: int
    number: int
    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """To source or target: free the blocks that are still held or reserved; the migration ends for it."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class KvHeld:
    """The source holds blocks; those that the target lacks are beside the message.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        is_running: Whether the request runs there; if False, no blocks are beside the message.
        address: Of the source's bulk server, ``HOST:PORT``.
    """

    epoch: int
    number: int
    is_running: bool
    address: HostPort


@dataclass(frozen=True, slots=True)
class KvPulled:
    """The target has copied blocks, or failed to.

    Attributes:
        epoch: Of the target.
        number: Of the migration.
        is_whole: Whether all arrived and were verified.
    """

    epoch: int
    number: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class RequestStopped:
    """The source has ended the request; blocks that the target lacks are beside the message.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        is_stopped: False if the request ended before or does not run: then its placement does not change.
        num_tokens: Its known tokens, prompt included; all of them were sent to the router before.
        num_computed: Leading tokens whose KV is held.
    """

    epoch: int
    number: int
    is_stopped: bool
    num_tokens: int
    num_computed: int


MigrationOrder = HoldKv | PullKv | StopRequest | GoOn | ReleaseKv
MigrationAnswer = KvHeld | KvPulled | RequestStopped
