"""Messages and answers as JSON: they survive a round trip; the API accepts every message of a member."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from floodplain.coordinator.bodies import MAX_MESSAGES, MessageBatch, answer_model
from floodplain.core import codec
from floodplain.core.codec import WireError, from_json, to_json
from floodplain.leases.messages import Heartbeat, Join, Message
from floodplain.leases.rows import Member, Reply, Shard
from floodplain.leases.states import Lease, LeaseId, Outcome
from floodplain.lending.membership import LentDevice, Membership
from floodplain.lending.wire import (
    EncodedReply,
    check_listing,
    decode_answer,
    decode_reply,
    encode_message,
    encode_replies,
)
from tests.support import lease_values
from tests.support.examples import examples

REPLY = answer_model(EncodedReply)


def test_an_older_coordinator_knows_no_lenders() -> None:
    row = to_json(Member("ann", "i1", is_lender=True))
    assert from_json(Member, row, is_open=True).is_lender
    del row["is_lender"]
    assert not from_json(Member, row, is_open=True).is_lender


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def batch(*encoded: dict[str, Any]) -> MessageBatch:
    return MessageBatch.model_validate({"messages": list(encoded)})


@settings(max_examples=examples(200))
@given(message=lease_values.MESSAGES)
def test_the_api_takes_every_message_as_it_was_sent(message: Message) -> None:
    assert batch(through_json(encode_message(message))).messages == [message]


@settings(max_examples=examples(100))
@given(reply=lease_values.REPLIES)
def test_an_answer_comes_out_as_it_went_in_and_as_it_is_documented(reply: Reply) -> None:
    assert decode_reply(through_json(to_json(reply))) == reply
    REPLY.model_validate_json(json.dumps(to_json(reply)), strict=True)


@settings(max_examples=examples(30))
@given(replies=st.lists(lease_values.REPLIES, min_size=1, max_size=3), places=st.lists(st.integers(0, 2), max_size=6))
def test_replies_that_share_leases_come_out_as_they_went_in(replies: list[Reply], places: list[int]) -> None:
    some = [for_bob(replies[place % len(replies)]) for place in range(len(replies))]
    shared = [replace(some[place % len(some)], detail="") for place in places]
    encoded = through_json(encode_replies(shared))
    assert decode_answer({"ttl_s": 1, "replies": encoded}, ["bob"] * len(shared)).replies == tuple(shared)
    most = sum(len(reply.leases) for reply in some)
    assert sum(len(reply["leases"]) for reply in encoded) <= most
    for reply in encoded:
        REPLY.model_validate_json(json.dumps(reply), strict=True)


@pytest.mark.parametrize("place", [-1, 1, 2, True, "0", 0.0, 10**400, [0]])
def test_a_reply_shares_leases_with_an_earlier_one_alone(place: Any) -> None:
    first = to_json(Reply(Outcome.APPLIED))
    decode_answer({"ttl_s": 1, "replies": [first, {**first, "leases_of": 0}]}, ["bob"] * 2)
    with pytest.raises(WireError, match="leases_of"):
        decode_answer({"ttl_s": 1, "replies": [first, {**first, "leases_of": place}]}, ["bob"] * 2)


@given(lease=lease_values.LEASES)
def test_a_row_comes_out_as_it_went_in_and_what_is_new_in_it_is_left_out(lease: Lease) -> None:
    row = through_json(to_json(lease))
    assert from_json(Lease, {**row, "from_the_future": 1}, is_open=True) == lease
    with pytest.raises(WireError):
        from_json(Lease, {**row, "from_the_future": 1})


JOIN = {"kind": "join", "name": "ann", "instance": "i1"}
OFFER = {"kind": "offer", "name": "ann", "stamp": {"generation": 1, "revision": 1}, "offered_bytes": 1}
RECALL = {"kind": "recall", "name": "ann", "stamp": {"generation": 1, "revision": 1}, "num_bytes": 1, "deadline_s": 1}
REQUEST = {"kind": "request", "name": "ann", "generation": 1, "number": 1, "shards": [{"num_bytes": 1}]}
REPORT = {
    "kind": "report", "name": "ann", "lease_id": "l1", "stamp": {"generation": 1, "revision": 1}, "event": "hold",
}  # fmt: skip


@pytest.mark.parametrize("message", [JOIN, OFFER, RECALL, REQUEST, REPORT])
def test_the_messages_that_are_spoilt_below_are_taken(message: dict[str, Any]) -> None:
    batch(message)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (JOIN, {"name": ""}),
        (JOIN, {"name": "a" * 65}),
        (JOIN, {"name": "-a"}),
        (JOIN, {"name": "a\n"}),
        (JOIN, {"name": "a\0"}),
        (JOIN, {"name": "a/b"}),
        (JOIN, {"name": "\u00e4"}),
        (JOIN, {"name": 1}),
        (JOIN, {"instance": ""}),
        (JOIN, {"instance": "a b"}),
        (JOIN, {"instance": "a\n"}),
        (JOIN, {"instance": "\0"}),
        (JOIN, {"instance": "i" * 129}),
        (JOIN, {"kind": "quit"}),
        (JOIN, {"kind": "Join"}),
        (JOIN, {"more": 1}),
        (OFFER, {"offered_bytes": -1}),
        (OFFER, {"offered_bytes": 2**62}),
        (OFFER, {"offered_bytes": 10**400}),
        (OFFER, {"offered_bytes": 1.0}),
        (OFFER, {"offered_bytes": True}),
        (OFFER, {"offered_bytes": "1"}),
        (OFFER, {"stamp": {"generation": 1}}),
        (OFFER, {"stamp": {"generation": 2**63, "revision": 1}}),
        (OFFER, {"stamp": [1, 1]}),
        (RECALL, {"num_bytes": 0}),
        (RECALL, {"deadline_s": -1}),
        (RECALL, {"deadline_s": 86401}),
        (RECALL, {"deadline_s": float("nan")}),
        (RECALL, {"deadline_s": "nan"}),
        (RECALL, {"deadline_s": "5"}),
        (RECALL, {"deadline_s": True}),
        (RECALL, {"deadline_s": None}),
        (REQUEST, {"number": 0}),
        (REQUEST, {"shards": []}),
        (REQUEST, {"shards": [{"num_bytes": 1}] * 65}),
        (REQUEST, {"shards": [{"num_bytes": 0}]}),
        (REQUEST, {"shards": [{"num_bytes": 1, "producer": ""}]}),
        (REQUEST, {"shards": [{"num_bytes": 2**62}]}),
        (REPORT, {"event": "expire"}),
        (REPORT, {"event": "settle"}),
        (REPORT, {"event": "recall"}),
        (REPORT, {"lease_id": "a b"}),
        (REPORT, {"reason": "a\nb"}),
        (REPORT, {"reason": "r" * 201}),
        (REPORT, {"reason": None}),
    ],
)
def test_a_message_that_no_member_sends_is_refused(message: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        batch({**message, **change})


# -- answers of an unknown server --------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    st.sampled_from([10**400, -(10**400), 2**63, 2**64, 1e300, -1e300, 5e-324]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["bob", "granted", "../bob", "\033[2J", "x" * 5000]),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


@st.composite
def spoilt_answers(draw: st.DrawFn) -> Any:
    """An answer to two messages of ``bob`` with at most one value, at any depth, replaced or removed."""
    replies = draw(st.lists(lease_values.REPLIES, min_size=2, max_size=2))
    answer = {"ttl_s": draw(st.floats(0.1, 3600)), "replies": [to_json(for_bob(reply)) for reply in replies]}
    answer = through_json(answer)
    place: Any = answer
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
            place = place[key]
            continue
        if draw(st.booleans()):
            place[key] = draw(VALUES)
        elif draw(st.booleans()):
            del place[key]
        return answer


def for_bob(reply: Reply) -> Reply:
    """The reply with ``bob`` as member, as lender of the first lease and borrower of the others."""
    member = reply.member and replace(reply.member, name="bob")
    ends = ({"producer": "bob"} if not index else {"consumer": "bob"} for index in range(len(reply.leases)))
    leases = tuple(replace(lease, **end) for lease, end in zip(reply.leases, ends, strict=True))
    return replace(reply, member=member, leases=leases)


def live_through(answer: Any) -> None:
    """Let a member that lends and borrows learn an answer if it can be decoded, and continue."""
    membership = Membership("bob", "i1", LentDevice(capacity_bytes=100, foreign_bytes=lambda: 0), lambda: 1.0)
    membership.ask([Shard(1)])
    membership.lend(50)
    messages = [Join("bob", "i1"), Heartbeat("bob", 1)]
    try:
        told = decode_answer(answer, [message.name for message in messages])
    except WireError as error:
        assert str(error).isprintable() and len(str(error)) < 300
        return
    version = membership.version
    assert membership.learn(messages, told.replies, told.ttl_s, 0.5) is (membership.version > version)
    for lease in membership.to_allocate():
        membership.allocated(lease.lease_id)
    for lease_id in membership.to_free():
        membership.freed(lease_id)
    assert 0 <= membership.claim(60, 10) <= 100 and membership._lender.promised_bytes >= 0
    assert all(size > 0 for size in membership.lease_bytes().values())
    assert membership.has_leases or not (membership.lease_bytes() or membership.expects_bytes)
    for said in (membership.collect()[0], [membership.retire()], membership.collect()[0], membership.farewell()):
        json.dumps([encode_message(message) for message in said if not isinstance(message, bool)])


@settings(max_examples=examples(150))
@given(answer=spoilt_answers())
def test_an_answer_of_any_shape_is_values_or_one_kind_of_error(answer: Any) -> None:
    live_through(answer)


@settings(max_examples=examples(100))
@given(value=VALUES)
def test_any_json_is_values_or_one_kind_of_error(value: Any) -> None:
    for read in (lambda: decode_answer(value, ["bob"]), lambda: decode_reply(value), lambda: check_listing(value)):
        with suppress(WireError):
            read()


def test_a_reader_that_lets_all_types_in_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the law above fails where a field's type is not checked."""
    lease = Lease(LeaseId("l1"), 1, "ann", "bob", 5, 1)
    reply = to_json(Reply(Outcome.APPLIED, Member("bob", "i1"), (lease,)))
    spoilt = {**reply, "leases": [{**reply["leases"][0], "num_bytes": "many"}]}
    answer = {"ttl_s": 10.0, "replies": [spoilt, reply]}
    live_through(answer)
    monkeypatch.setattr(codec, "_check", lambda value, kinds, bounds: value)
    with pytest.raises(TypeError):
        live_through(answer)


@pytest.mark.parametrize("number", [0, MAX_MESSAGES + 1])
def test_a_batch_of_none_or_of_too_many_is_refused(number: int) -> None:
    batch(*[JOIN] * MAX_MESSAGES)
    with pytest.raises(ValidationError):
        batch(*[JOIN] * number)


def test_an_error_says_the_path_of_a_field_and_what_is_allowed() -> None:
    reply = to_json(Reply(Outcome.APPLIED))
    member = {**to_json(Member("bob", "i1")), "is_living": True, "leased_bytes": 0}
    listing = {"ttl_s": 1, "members": [member, {**member, "leased_bytes": -1}], "leases": []}
    with pytest.raises(WireError, match=r"^the listing\.members\[1\]\.leased_bytes is not from 0 to "):
        check_listing(listing)
    del member["leased_bytes"]
    with pytest.raises(WireError, match=r"^the listing\.members\[0\] lacks leased_bytes$"):
        check_listing(listing)
    with pytest.raises(WireError, match=r"^the answer lacks ttl_s$"):
        decode_answer({"replies": [reply]}, ["bob"])
    with pytest.raises(WireError, match=r"^the answer\.replies\[1\]\.outcome is none of applied, "):
        decode_answer({"ttl_s": 1, "replies": [reply, {**reply, "outcome": "done"}]}, ["bob"] * 2)
