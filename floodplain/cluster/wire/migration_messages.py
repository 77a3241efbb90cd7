"""Messages of the router and two instances during a migration; ``cluster.migration.table`` has the protocol.

Every message names the migration by its number, which is used once. Block ids are sent beside a message, 32 bits each.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.cluster.wire.placements import Submit
from floodplain.core.ranges import HostPort, Secret


@dataclass(frozen=True, slots=True)
class MigrationMessage:
    """A message between the router and an instance that takes part in a migration.

    Attributes:
        epoch: Of the instance.
        number: Of the migration.
    """

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class HoldKv(MigrationMessage):
    """To the source: hold the request's sealed blocks, and let the target read them. Answered by ``KvHeld``.

    Attributes:
        ticket: Of the request.
        num_copied: Leading blocks that the target has.
        secret: The secret that the target will show, hexadecimal.
    """

    ticket: int
    num_copied: int
    secret: Secret


@dataclass(frozen=True, slots=True)
class PullKv(MigrationMessage):
    """To the target: copy the blocks beside the message from the source. Answered by ``KvPulled``.

    Attributes:
        address: Of the source's bulk server, ``HOST:PORT``.
        secret: The secret that the source admits, hexadecimal.
    """

    address: HostPort
    secret: Secret


@dataclass(frozen=True, slots=True)
class StopRequest(MigrationMessage):
    """To the source: end the request, and hold all of its blocks. Answered by ``RequestStopped``.

    Attributes:
        num_copied: Leading blocks that the target has.
    """

    num_copied: int


@dataclass(frozen=True, slots=True)
class GoOn(MigrationMessage):
    """To source or target: resume the request from the blocks that are there. Its tokens are beside the message.

    Attributes:
        num_computed: Leading tokens whose KV is there.
        submit: The request, as in any placement.
    """

    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class ReleaseKv(MigrationMessage):
    """To source or target: free the blocks that are still held or reserved; the migration ends for it."""


@dataclass(frozen=True, slots=True)
class KvHeld(MigrationMessage):
    """The source holds blocks; those that the target lacks are beside the message.

    Attributes:
        is_running: Whether the request runs there; if False, no blocks are beside the message.
        address: Of the source's bulk server, ``HOST:PORT``.
    """

    is_running: bool
    address: HostPort


@dataclass(frozen=True, slots=True)
class KvPulled(MigrationMessage):
    """The target has copied blocks, or failed to.

    Attributes:
        is_whole: Whether all arrived and were verified.
    """

    is_whole: bool


@dataclass(frozen=True, slots=True)
class RequestStopped(MigrationMessage):
    """The source has ended the request; blocks that the target lacks are beside the message.

    Attributes:
        is_stopped: False if the request ended before or does not run: then its placement does not change.
        num_tokens: Its known tokens, prompt included; all of them were sent to the router before.
        num_computed: Leading tokens whose KV is held.
    """

    is_stopped: bool
    num_tokens: int
    num_computed: int


MigrationOrder = HoldKv | PullKv | StopRequest | GoOn | ReleaseKv
MigrationAnswer = KvHeld | KvPulled | RequestStopped
