"""Handles consumers' messages: requests for leases, and reports on each lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from floodplain.leases.choice import choose_producers
from floodplain.leases.limits import DEFAULT_LIMITS, LeaseLimits
from floodplain.leases.messages import Report, Request
from floodplain.leases.rows import Reply
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, Outcome, Stamp, judge
from floodplain.leases.table import LeaseTable

SAID_BY_CONSUMERS = frozenset({LeaseEvent.HOLD, LeaseEvent.REFUSE, LeaseEvent.RELEASE})


def request(
    table: LeaseTable, message: Request, free_bytes: Mapping[str, int], limits: LeaseLimits = DEFAULT_LIMITS
) -> Reply:
    """Grant all of the shards, or none (DEFERRED: ask again).

    A copy of a request that arrives after its leases have ended is stale: a consumer is not granted leases that it no
    longer expects.

    Args:
        table: The rows.
        message: The request of a consumer that is alive.
        free_bytes: Unleased bytes of each producer that the consumer may borrow from, best first.
        limits: The most that a consumer may request and have.
    """
    known = table.members[message.name]
    granted = table.of_request(message.name, message.generation, message.number)
    if granted:
        return Reply(Outcome.APPLIED, known, tuple(granted))
    if message.number <= known.last_request:
        return Reply(Outcome.STALE, known, detail=f"request {message.number} of {message.name} is an old one")
    refusal = _refuse_by_limits(table, message, limits)
    if refusal is not None:
        return replace(refusal, member=known)
    producers = choose_producers(message.shards, free_bytes)
    if producers is None:
        return Reply(Outcome.DEFERRED, known, detail="no producer has as much to lend")
    leases = tuple(_grant(message, index, producer) for index, producer in enumerate(producers))
    for lease in leases:
        table.put_lease(lease)
    table.put_member(replace(known, last_request=message.number))
    return Reply(Outcome.APPLIED, table.members[message.name], leases)


def report(table: LeaseTable, message: Report) -> Reply:
    """Apply a consumer's report that it allocated, refused, or freed a lease."""
    lease = table.leases.get(message.lease_id)
    if lease is None:
        return Reply(Outcome.STALE, detail=f"lease {message.lease_id} has ended, or never was")
    if message.name != lease.consumer:
        return Reply(Outcome.CONFLICT, detail=f"lease {message.lease_id} is not of {message.name}")
    outcome = _judge_report(message, lease)
    if outcome is not Outcome.APPLIED:
        return Reply(outcome, leases=(lease,), detail=f"lease {lease.lease_id} is {lease.state.value}")
    is_new_allocation = not lease.held_bytes and message.event is not LeaseEvent.REFUSE
    lease = lease.after(message.event, reason=message.reason)
    if lease.is_owed:
        lease = table.owe(lease)
    else:
        table.put_lease(lease)
    if is_new_allocation:  # earlier observations lack it; a released lease may have been held without a report
        table.revise(table.members[lease.producer])
    return Reply(Outcome.APPLIED, table.members[lease.consumer], (lease,))


def _refuse_by_limits(table: LeaseTable, message: Request, limits: LeaseLimits) -> Reply | None:
    """Return a refusal if the request breaks a limit: CONFLICT if for good, DEFERRED if only for now."""
    name, asked = message.name, message.shards
    asked_bytes, least = sum(shard.num_bytes for shard in asked), limits.least_lease_bytes
    if min(shard.num_bytes for shard in asked) < least:
        return Reply(Outcome.CONFLICT, detail=f"{name} asks for a lease of less than {least} bytes, the least there is")
    if len(asked) > limits.max_leases or asked_bytes > limits.max_borrowed_bytes:
        most = f"{limits.max_leases} leases and {limits.max_borrowed_bytes} bytes"
        return Reply(Outcome.CONFLICT, detail=f"{name} asks for more than {most}, all that a consumer may have")
    leases = table.of_consumer(name)
    if len(leases) + len(asked) > limits.max_leases:
        return Reply(Outcome.DEFERRED, detail=f"{name} has {len(leases)} leases of at most {limits.max_leases}")
    num_bytes = sum(lease.num_bytes for lease in leases)
    if num_bytes + asked_bytes > limits.max_borrowed_bytes:
        return Reply(Outcome.DEFERRED, detail=f"{name} has {num_bytes} bytes of at most {limits.max_borrowed_bytes}")
    return None


def _grant(message: Request, index: int, producer: str) -> Lease:
    lease_id = LeaseId(f"{message.name}.{message.generation}.{message.number}.{index}")
    num_bytes = message.shards[index].num_bytes
    return Lease(lease_id, message.number, producer, message.name, num_bytes, message.generation)


def _judge_report(message: Report, lease: Lease) -> Outcome:
    outcome = judge(message.stamp, Stamp(lease.generation, lease.revision))
    may = message.event in SAID_BY_CONSUMERS and lease.allows(message.event)
    return Outcome.CONFLICT if outcome is Outcome.APPLIED and not may else outcome
