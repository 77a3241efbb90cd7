"""What the front and two instances say while a running request moves between these: see ``cluster.migration_book``.

Every message names the migration by its number, which is used once. Blocks lie beside messages as 32-bit ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.cluster.placements import Submit
from floodplain.core.ranges import HostPort, Secret


@dataclass(frozen=True, slots=True)
class HoldKv:
    """To the source: hold the request's sealed blocks, and let the target read them: ``KvHeld``.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        ticket: Of the request.
        num_copied: Leading blocks that the target has.
        secret: That the target will show, hexadecimal.
    """

    epoch: int
    number: int
    ticket: int
    num_copied: int
    secret: Secret


@dataclass(frozen=True, slots=True)
class PullKv:
    """To the target: copy these blocks, which lie beside the message, from the source: ``KvPulled``.

    Attributes:
        epoch: Of the target.
        number: Of the migration.
        address: Of the source's bulk server, ``HOST:PORT``.
        secret: That it admits, hexadecimal.
    """

    epoch: int
    number: int
    address: HostPort
    secret: Secret


@dataclass(frozen=True, slots=True)
class StopRequest:
    """To the source: end the request, and hold all of its blocks: ``RequestStopped``.

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
    """Go on with the request from the blocks that are here, as target or as source. Its tokens lie beside the message.

    Attributes:
        epoch: Of the instance.
        number: Of the migration, which is over for the instance.
        num_computed: Leading tokens whose KV is there.
        submit: Else as any request.
    """

    epoch: int
    number: int
    num_computed: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """The migration is over for the instance: free the blocks that are still held or reserved for it."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class KvHeld:
    """The source holds blocks; those that the target lacks lie beside the message.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        is_running: Whether the request runs there; if it does not, nothing is held.
        address: Of its bulk server, ``HOST:PORT``.
    """

    epoch: int
    number: int
    is_running: bool
    address: HostPort


@dataclass(frozen=True, slots=True)
class KvPulled:
    """The target has copied blocks, or has failed to.

    Attributes:
        epoch: Of the target.
        number: Of the migration.
        is_whole: Whether all are there, and were proven whole.
    """

    epoch: int
    number: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class RequestStopped:
    """The source has ended the request; blocks that the target lacks lie beside the message.

    Attributes:
        epoch: Of the source.
        number: Of the migration.
        is_stopped: False if it ended before, or does not run: then it is where it was.
        num_tokens: Its known tokens, prompt included; the front was told all of them.
        num_computed: Leading tokens whose KV is held.
    """

    epoch: int
    number: int
    is_stopped: bool
    num_tokens: int
    num_computed: int


MigrationOrder = HoldKv | PullKv | StopRequest | GoOn | ReleaseKv
MIGRATION_ORDERS = (HoldKv, PullKv, StopRequest, GoOn, ReleaseKv)
MigrationAnswer = KvHeld | KvPulled | RequestStopped
MIGRATION_ANSWERS = (KvHeld, KvPulled, RequestStopped)
