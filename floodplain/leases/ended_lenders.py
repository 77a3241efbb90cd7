"""Settles leases whose lenders have ended: no lender observes these bytes, so their consumers' reports settle them.

A consumer that reports a lease as freed, or as never allocated, holds nothing under it. So others hold bytes of the
device only under leases without such a report and, at most ``Member.hidden_bytes``, under leases that have ended. That
many bytes stay leased, so law 2 of docs/design/005-leases.md holds.
"""

from __future__ import annotations

from collections import defaultdict

from floodplain.leases.choice import choose_settled
from floodplain.leases.lending import settle
from floodplain.leases.states import Lease, LeaseId
from floodplain.leases.table import LeaseTable


class EndedLenders:
    """Settles freed leases of ended lenders after a delay.

    Args:
        table: The rows that it changes.
        wait_s: Seconds between a consumer's report and its effect: a driver may take so long to reclaim freed memory.
    """

    def __init__(self, table: LeaseTable, wait_s: float) -> None:
        self._table, self._wait_s = table, wait_s
        self._since_s: dict[LeaseId, float] = {}

    def settle(self, now: float) -> None:
        """Settle leases that were freed and whose lenders have ended, once both are known here for ``wait_s``."""
        unseen = [lease for lease in self._table.freed.values() if not self._table.members[lease.producer].instance]
        self._since_s = {lease.lease_id: self._since_s.get(lease.lease_id, now) for lease in unseen}
        due: defaultdict[str, list[Lease]] = defaultdict(list)
        for lease in unseen:
            if now - self._since_s[lease.lease_id] > self._wait_s:
                due[lease.producer].append(lease)
        for name, leases in due.items():
            self._settle_device(name, leases)

    def _settle_device(self, name: str, freed: list[Lease]) -> None:
        member = self._table.members[name]
        spare = sum(lease.num_bytes for lease in freed) - member.hidden_bytes
        chosen = choose_settled(freed, spare)
        if chosen:
            settle(self._table, member, chosen)
