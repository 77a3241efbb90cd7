"""Strategies for stored and sent values: rows, messages and replies, up to the extremes that the API allows."""

from __future__ import annotations

from hypothesis import strategies as st

from floodplain.leases.messages import Heartbeat, Join, Leave, Message, Observe, Offer, Recall, Report, Request
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseEvent, LeaseId, LeaseState, Outcome, Stamp

MOST = 2**62 - 1
"""The largest number that a message may have."""

LETTERS = "ABCXYZabcxyz0189"
NAMES = st.one_of(
    st.sampled_from(["gpu-0", "gpu-1", "a" * 64, "0", "A.b_c-d"]),
    st.text(LETTERS + "._-", min_size=1, max_size=64).filter(lambda name: name[0] not in "._-"),
)
PRINTABLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
IDENTITIES = st.one_of(st.text(PRINTABLE, min_size=1, max_size=128), st.just("~" * 128))
REASONS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200)
COUNTS = st.one_of(st.integers(0, 9), st.just(MOST), st.integers(0, MOST))
NUMBERS = COUNTS.map(lambda count: max(count, 1))
DEADLINES_S = st.one_of(st.sampled_from([0.0, 5e-324, 86400.0]), st.floats(0, 86400))
STAMPS = st.builds(Stamp, COUNTS, COUNTS)

MEMBERS = st.builds(
    Member,
    NAMES,
    st.one_of(st.just(""), IDENTITIES),
    NUMBERS,
    st.one_of(NUMBERS, st.just(2**63 - 1)),
    COUNTS,
    COUNTS,
    hidden_bytes=COUNTS,
)
LEASES = st.builds(
    Lease,
    lease_id=IDENTITIES.map(LeaseId),
    request=NUMBERS,
    producer=NAMES,
    consumer=NAMES,
    num_bytes=NUMBERS,
    generation=NUMBERS,
    state=st.sampled_from(LeaseState),
    revision=NUMBERS,
    held_bytes=COUNTS,
    deadline_s=st.none() | DEADLINES_S,
    reason=REASONS,
)

REPORTED = st.sampled_from([LeaseEvent.HOLD, LeaseEvent.REFUSE, LeaseEvent.RELEASE])
SHARDS = st.builds(Shard, NUMBERS, st.none() | NAMES)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Join, NAMES, IDENTITIES),
    st.builds(Leave, NAMES, COUNTS),
    st.builds(Heartbeat, NAMES, COUNTS),
    st.builds(Offer, NAMES, STAMPS, COUNTS),
    st.builds(Recall, NAMES, STAMPS, NUMBERS, DEADLINES_S),
    st.builds(Observe, NAMES, STAMPS, COUNTS),
    st.builds(Request, NAMES, COUNTS, NUMBERS, st.lists(SHARDS, min_size=1, max_size=64).map(tuple)),
    st.builds(Report, NAMES, IDENTITIES.map(LeaseId), STAMPS, REPORTED, REASONS),
)
REPLIES = st.builds(
    Reply,
    outcome=st.sampled_from(Outcome),
    member=st.none() | MEMBERS,
    leases=st.lists(LEASES, max_size=4).map(tuple),
    due_in_s=st.dictionaries(IDENTITIES.map(LeaseId), st.floats(0, 86400), max_size=4),
    detail=st.text(max_size=80).filter(str.isprintable),
)
