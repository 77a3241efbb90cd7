"""A real store with a hook around every call: the test chooses where it fails, or what happens between calls."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

import sqlalchemy as sql

from floodplain.coordinator.schema import BOOK, LEASES, MEMBERS
from floodplain.coordinator.store import Leadership, Store, StoredRows, StoreError
from floodplain.leases.rows import Member
from floodplain.leases.states import Lease, LeaseId, LeaseState
from floodplain.leases.table import Changes

T = TypeVar("T")


def let_pass(_: str) -> None:
    """A hook that does nothing."""


class HookedStore(Store):
    """See the module. Uses SQLite without fsync.

    Attributes:
        hook: Called with ``before CALL`` and ``after CALL``; its errors reach the caller.
        epoch: The last epoch taken over through this store.
    """

    def __init__(self, engine: sql.Engine) -> None:
        super().__init__(engine)
        sql.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF").close())
        self.hook: Callable[[str], None] = let_pass
        self.epoch = 0

    def look(self) -> Leadership:
        return self._hooked("look", super().look)

    def take_over(self, seen: Leadership, leader: str, leader_url: str, ttl_s: float) -> StoredRows | None:
        rows = self._hooked("take_over", lambda: super(HookedStore, self).take_over(seen, leader, leader_url, ttl_s))
        if rows is not None:
            self.epoch = seen.epoch + 1
        return rows

    def write(self, epoch: int, changes: Changes, unix_s: float, ttl_s: float) -> bool:
        return self._hooked("write", lambda: super(HookedStore, self).write(epoch, changes, unix_s, ttl_s))

    def resign(self, epoch: int) -> None:
        self._hooked("resign", lambda: super(HookedStore, self).resign(epoch))

    def rows(self) -> tuple[dict[str, Member], dict[LeaseId, Lease]]:
        """Return the committed rows, under any leader."""
        with self._engine.connect() as connection:
            members = [Member(**row) for row in connection.execute(sql.select(MEMBERS)).mappings()]
            leases = [dict(row) for row in connection.execute(sql.select(LEASES)).mappings()]
        for row in leases:
            del row["granted_unix_s"]
        kept = [Lease(**{**row, "state": LeaseState(row["state"])}) for row in leases]
        return {member.name: member for member in members}, {lease.lease_id: lease for lease in kept}

    def clear(self) -> None:
        """Delete all rows, and the leader, without the hook."""
        with self._engine.begin() as connection:
            connection.execute(BOOK.update().values(ttl_s=0.0, leader=""))
            connection.execute(MEMBERS.delete())
            connection.execute(LEASES.delete())

    def epoch_now(self) -> int:
        """Return the stored epoch, without the hook."""
        with self._engine.connect() as connection:
            return int(connection.execute(sql.select(BOOK.c.epoch)).scalar_one())

    def _hooked(self, name: str, call: Callable[[], T]) -> T:
        self.hook(f"before {name}")
        value = call()
        self.hook(f"after {name}")
        return value


def failing(random: Random, part: float) -> Callable[[str], None]:
    """Return a hook that fails a part of all calls: before or after the database executes them."""

    def hook(moment: str) -> None:
        if random.random() < part / 2:
            raise StoreError(moment, None, ConnectionError(f"the store fails {moment}"))

    return hook
