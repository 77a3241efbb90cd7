"""Leases of lenders that have ended: no look settles them any more, so their consumers' word does.

A consumer that says that it has freed a lease, or never had it, holds nothing under it. So what others hold of the
device lies under leases whose consumers have not said so, and, for at most ``Member.hidden_bytes``, under leases that
have ended. As much as both stays leased, and law 2 of docs/design/005-leases.md holds.
"""

from __future__ import annotations

from collections import defaultdict

from floodplain.leases.choice import choose_settled
from floodplain.leases.lending import settle
from floodplain.leases.states import Lease, LeaseId
from floodplain.leases.table import LeaseTable


class EndedLenders:
    """See the module.

    Args:
        table: The rows that it changes.
        wait_s: Seconds between a consumer's word and its effect. A driver may take so long to take freed memory back.
    """

    def __init__(self, table: LeaseTable, wait_s: float) -> None:
        self._table, self._wait_s = table, wait_s
        self._since_s: dict[LeaseId, float] = {}

    def settle(self, now: float) -> None:
        """Settle what was freed of devices whose lenders have ended, once both are known here for ``wait_s``."""
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
