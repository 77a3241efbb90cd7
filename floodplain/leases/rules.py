"""The rules by which messages of producers and consumers, and a lender's end, change the rows.

**A lender's end.** The reports of its consumers settle its bytes. A consumer that reports a lease as freed, or as never
allocated, holds nothing under it. So others hold bytes of the device only under leases without such a report and, at
most ``Member.hidden_bytes``, under leases that have ended. That many bytes stay leased, so law 2 of
docs/design/005-leases.md holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from floodplain.leases.choice import choose_producers, choose_recalls, choose_settled
from floodplain.leases.messages import Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome, Stamp, judge
from floodplain.leases.table import LeaseTable

LEAST_LEASE_BYTES = 64 * 1024
"""One page of a host device. A lease of one byte costs the coordinator as much as one of a gigabyte."""
MAX_LEASES = 1024
MAX_BORROWED_BYTES = 2**40
MAX_LEASES_ON_DEVICE = 4096
MAX_MEMBERS = 4096
FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """Limits of one lease book; ``max_leases`` and ``max_borrowed_bytes`` are of one consumer. Owed leases count.

    ``max_members``: living and ended. If it is reached, a new member replaces the one that ended first.
    ``forget_after_s``: a member that ended so long ago, and that has no lease, is forgotten.
    """

    least_lease_bytes: int = 1
    max_leases: int = MAX_LEASES
    max_borrowed_bytes: int = MAX_BORROWED_BYTES
    max_leases_on_device: int = MAX_LEASES_ON_DEVICE
    max_members: int = MAX_MEMBERS
    forget_after_s: float = FORGET_AFTER_S

    @property
    def max_consumers(self) -> int:
        """Return the most members with which one may join without a producer's token; the rest is room for lenders."""
        return self.max_members - self.max_members // 4


DEFAULT_LIMITS = LeaseLimits()


# -- producers' messages -----------------------------------------------------------------------------------------------


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
    late. Then an expired lease is settled although its bytes are held (``Member.hidden_bytes``).
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
    """Settle owed leases of ``member``: their bytes are its own and no longer offered; return its row and theirs."""
    settled = tuple(lease.after(LeaseEvent.SETTLE) for lease in leases)
    for lease in settled:
        table.put_lease(lease)
    offered = member.offered_bytes - sum(lease.num_bytes for lease in settled)
    return table.revise(replace(member, offered_bytes=offered)), settled


def lose(table: LeaseTable, name: str) -> Reply:
    """End allocated and owed leases of a device that is gone. The member's row stays, so generations go on from it.

    Leases that a consumer may still allocate are recalled instead, and stay leased until the consumer has learned it or
    is dead: there may already be another device under that name, on which it would allocate.
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


# -- consumers' messages -----------------------------------------------------------------------------------------------


SAID_BY_CONSUMERS = frozenset({LeaseEvent.HOLD, LeaseEvent.REFUSE, LeaseEvent.RELEASE})


def request(
    table: LeaseTable, message: Request, free_bytes: Mapping[str, int], limits: LeaseLimits = DEFAULT_LIMITS
) -> Reply:
    """Grant all of the shards, or none (DEFERRED: request again). A copy whose leases have ended is stale.

    ``free_bytes`` has the unleased bytes of each producer that the consumer may borrow from, best first.
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
    """Return CONFLICT if the request breaks a limit for good, DEFERRED if only for now."""
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


# -- lenders that have ended -------------------------------------------------------------------------------------------


class EndedLenders:
    """Settles freed leases of ended lenders after ``wait_s`` seconds: a driver reclaims memory in less."""

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
