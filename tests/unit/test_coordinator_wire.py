"""Messages and answers as JSON: what goes in comes out, and the API takes every message that members can say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from floodplain.coordinator.answers import ReplyBody
from floodplain.coordinator.requests import MAX_MESSAGES, MessageBatch
from floodplain.coordinator.wire import (
    check_listing,
    decode_lease,
    decode_reply,
    encode_lease,
    encode_message,
    encode_reply,
)
from floodplain.core.leases.messages import Message
from floodplain.core.leases.rows import Reply
from floodplain.core.leases.states import Lease
from tests.support import lease_values
from tests.support.examples import examples


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def batch(*encoded: dict[str, Any]) -> MessageBatch:
    return MessageBatch.model_validate({"messages": list(encoded)})


@settings(max_examples=examples(200))
@given(message=lease_values.MESSAGES)
def test_the_api_takes_every_message_as_it_was_said(message: Message) -> None:
    assert [taken.to_core() for taken in batch(through_json(encode_message(message))).messages] == [message]


@settings(max_examples=examples(100))
@given(reply=lease_values.REPLIES)
def test_an_answer_comes_out_as_it_went_in_and_as_it_is_documented(reply: Reply) -> None:
    assert decode_reply(through_json(encode_reply(reply))) == reply
    ReplyBody.model_validate_json(json.dumps(encode_reply(reply)), strict=True)


@given(lease=lease_values.LEASES)
def test_a_row_comes_out_as_it_went_in_and_what_is_new_in_it_is_left_out(lease: Lease) -> None:
    assert decode_lease({**through_json(encode_lease(lease)), "from_the_future": 1}) == lease


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
def test_a_message_that_no_member_says_is_refused(message: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        batch({**message, **change})


@pytest.mark.parametrize("number", [0, MAX_MESSAGES + 1])
def test_a_batch_of_none_or_of_too_many_is_refused(number: int) -> None:
    batch(*[JOIN] * MAX_MESSAGES)
    with pytest.raises(ValidationError):
        batch(*[JOIN] * number)


@pytest.mark.parametrize(
    "listing",
    [
        {},
        {"members": []},
        {"members": 1, "leases": []},
        {"members": [], "leases": None},
        {"members": [{}], "leases": []},
        {"members": [], "leases": ["l1"]},
    ],
)
def test_a_listing_that_is_none_is_noticed(listing: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        check_listing(listing)
