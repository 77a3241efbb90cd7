"""Handles producers' messages: offer bytes, recall them, and observe them free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from floodplain.leases.choice import choose_recalls, choose_settled
from floodplain.leases.messages import Observe, Offer, Recall
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseEvent, LeaseState, Outcome
from floodplain.leases.table import LeaseTable


def offer(table: LeaseTable, message: Offer) -> Reply:
    """Set what is offered; a smaller value withdraws unleased bytes. Nothing else raises an offer."""
    known, leased = table.members[message.name], table.leased_bytes(message.name)
    if message.offered_bytes < leased:
        return Reply(Outcome.CONFLICT, known, detail=f"{leased} bytes of {message.name} are leased: recall them first")
    return Reply(Outcome.APPLIED, table.revise(replace(known, offered_bytes=message.offered_bytes, is_lender=True)))


def recall(table: LeaseTable, message: Recall) -> Reply:
    """Withdraw unleased bytes immediately, and recall leases for the rest."""
    known = table.members[message.name]
    withdrawn = min(message.num_bytes, table.unleased_bytes(message.name))
    chosen = choose_recalls(table.on_device(message.name), message.num_bytes - withdrawn)
    recalled = tuple(recall_lease(table, lease, message.deadline_s) for lease in chosen)
    return Reply(Outcome.APPLIED, table.revise(replace(known, offered_bytes=known.offered_bytes - withdrawn)), recalled)


def recall_lease(table: LeaseTable, lease: Lease, deadline_s: float) -> Lease:
    """Recall a lease, and return its new row."""
    recalled = lease.after(LeaseEvent.RECALL, deadline_s=deadline_s)
    table.put_lease(recalled)
    return recalled


def observe(table: LeaseTable, message: Observe) -> Reply:
    """Settle what is owed beyond the bytes that others were observed to hold.

    Let A be the allocated bytes of leases that consumers still count on. Others hold at least A, so of what is owed at
    most ``foreign_bytes - A`` is still held. Every message that shows that a lease was, or may have been, allocated
    raises the member's revision, so that an earlier observation is stale.

    A consumer that counts on a lease may hold nothing of it: it has died, or its report of the freed lease came too
    late for this observation. Then an expired lease is settled although its bytes are held (``Member.hidden_bytes``).
    """
    known, leases = table.members[message.name], table.on_device(message.name)
    allocated = sum(lease.held_bytes for lease in leases if not lease.is_owed)
    owed = sorted((lease for lease in leases if lease.is_owed), key=_trust)
    proven = sum(lease.num_bytes for lease in owed) - max(0, message.foreign_bytes - allocated)
    free = choose_settled(owed, proven)
    unsaid = sum(lease.num_bytes for lease in free if lease.state is LeaseState.EXPIRED)
    hidden = min(known.hidden_bytes + unsaid, message.foreign_bytes)
    if not free and hidden == known.hidden_bytes:
        return Reply(Outcome.APPLIED, known)
    return Reply(Outcome.APPLIED, *settle(table, replace(known, hidden_bytes=hidden), free))


def settle(table: LeaseTable, member: Member, leases: Iterable[Lease]) -> tuple[Member, tuple[Lease, ...]]:
    """Settle owed leases: their bytes are the producer's and no longer offered; return its row and theirs.

    Ended leases hold no more of the device than is leased there (law 2), so the bound on ``hidden_bytes`` falls, too.

    Args:
        table: The rows.
        member: The producer's row, with its other changes.
        leases: Owed to it.
    """
    settled = tuple(lease.after(LeaseEvent.SETTLE) for lease in leases)
    for lease in settled:
        table.put_lease(lease)
    offered = member.offered_bytes - sum(lease.num_bytes for lease in settled)
    hidden = min(member.hidden_bytes, table.leased_bytes(member.name))
    return table.revise(replace(member, offered_bytes=offered, hidden_bytes=hidden)), settled


def lose(table: LeaseTable, name: str) -> Reply:
    """End allocated and owed leases of a device that is gone. The member's row stays, so generations go on from it.

    Leases that a consumer may still allocate are recalled instead, and stay leased until the consumer knows or is dead:
    there may already be another device under that name, on which it would allocate.
    """
    leases = table.on_device(name)
    lost = [lease.after(LeaseEvent.LOSE) for lease in leases if lease.held_bytes or lease.is_owed]
    recalled = [lease.after(LeaseEvent.RECALL, deadline_s=0.0) for lease in leases if lease.state is LeaseState.GRANTED]
    for lease in (*lost, *recalled):
        table.put_lease(lease)
    row = replace(table.members[name], offered_bytes=table.leased_bytes(name), hidden_bytes=0)
    return Reply(Outcome.APPLIED, table.revise(row), (*lost, *recalled))


def _trust(lease: Lease) -> tuple[int, str]:
    """Sort key: leases whose consumers reported them free first, as the likeliest to be what was observed free."""
    return (LeaseState.RELEASED, LeaseState.REFUSED, LeaseState.EXPIRED).index(lease.state), lease.lease_id
