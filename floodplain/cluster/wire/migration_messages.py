"""Messages of the router and two instances during a migration; ``cluster.migration.table`` has the protocol.

A migration's number is used once. Block ids are beside a message, 32 bits each; secrets are hexadecimal.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.cluster.wire.placements import Submit
from floodplain.core.ranges import HostPort, Secret


@dataclass(frozen=True, slots=True)
class MigrationMessage:
    """A message to or from the instance ``epoch`` about the migration ``number``."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class HoldKv(MigrationMessage):
    """To the source: hold the request's sealed blocks, and let the target read them. Answered by ``KvHeld``.

    The target has ``num_copied`` leading blocks, and will show ``secret``.
    """

    ticket: int
    num_copied: int
    secret: Secret


@dataclass(frozen=True, slots=True)
class PullKv(MigrationMessage):
    """To the target: copy the blocks beside the message from the source's bulk server. Answered by ``KvPulled``."""

    address: HostPort
    secret: Secret


@dataclass(frozen=True, slots=True)
class StopRequest(MigrationMessage):
    """To the source: end the request, and hold its blocks after ``num_copied``. Answered by ``RequestStopped``."""

    num_copied: int


@dataclass(frozen=True, slots=True)
class GoOn(MigrationMessage):
    """To source or target: resume the request from the KV of ``num_computed`` tokens. All its tokens are beside this.

    The migration ends for this instance.
    """

    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class ReleaseKv(MigrationMessage):
    """To source or target: free the blocks that are still held or reserved; the migration ends for it."""


@dataclass(frozen=True, slots=True)
class KvHeld(MigrationMessage):
    """The source holds blocks, if the request runs; those that the target lacks are beside the message."""

    is_running: bool
    address: HostPort


@dataclass(frozen=True, slots=True)
class KvPulled(MigrationMessage):
    """The target has copied blocks; not ``is_whole``: some did not arrive, or were damaged."""

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
