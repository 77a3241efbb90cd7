"""Snapshots of a coordinator for its page: members, and leases with the seconds that recalled ones have left."""

from __future__ import annotations

from collections import Counter
from typing import Any

from floodplain import __version__
from floodplain.coordinator.service import BookView
from floodplain.coordinator.worker import LeaseWorker, NotLeading
from floodplain.live.changes import Snapshot
from floodplain.live.feed import Look

PERIOD_S = 1.0
"""Seconds between two looks at the book, each of which is a transaction."""
MOST_LEASES = 200
"""Leases of a snapshot, those that are due first; the newest of the others."""
MOST_MEMBERS = 200


def open_look(worker: LeaseWorker) -> Look:
    """A look at the book. A coordinator that does not lead shows who does."""

    async def look() -> Snapshot:
        service = worker.service
        facts = {"service": "coordinator", "version": __version__, "ttl_s": service.ttl_s}
        try:
            view = await worker.ask(service.look)
        except NotLeading:
            return Snapshot({**facts, "role": "standing by", "leader_url": service.leader_url, "members": []})
        return Snapshot({**facts, "role": "leading", **book_head(view)})

    return look


def book_head(view: BookView) -> dict[str, Any]:
    """The members and leases of a book as JSON values; beside long lists, their whole numbers."""
    borrowed: Counter[str] = Counter()
    for lease in view.leases:
        borrowed[lease.consumer] += lease.num_bytes
    members = [
        {
            "name": member.name,
            "is_living": is_living,
            "offered": member.offered_bytes,
            "lent": leased_bytes,
            "borrowed": borrowed[member.name],
        }
        for member, is_living, leased_bytes in sorted(view.members, key=lambda row: row[0].name)[:MOST_MEMBERS]
    ]
    due = view.due_in_s
    order = sorted(view.leases, key=lambda one: (due.get(one.lease_id, float("inf")), -view.granted_at(one)))
    leases = [
        {
            "from": lease.producer,
            "to": lease.consumer,
            "bytes": lease.num_bytes,
            "due_in_s": round(due[lease.lease_id], 1) if lease.lease_id in due else None,
            "state": lease.state.value,
            "since_s": round(view.taken_unix_s - view.granted_at(lease)),
        }
        for lease in order[:MOST_LEASES]
    ]
    counts = {"members": len(view.members), "leases": len(view.leases)}
    return {"members": members, "leases": leases, "counts": counts, "now_s": round(view.taken_unix_s, 3)}
