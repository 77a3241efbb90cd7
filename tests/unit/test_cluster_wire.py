"""Messages between the router and its instances: they survive a round trip; others are refused."""

from __future__ import annotations

import asyncio
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from floodplain.cluster.wire.frames import (
    CONTROL,
    MAX_HELLO_BYTES,
    MAX_UNSENT_BYTES,
    STAGE,
    UNREAD_S,
    Frame,
    FrameLink,
    FrameSocket,
)
from floodplain.cluster.wire.group_messages import HeldRequest, split_blocks
from floodplain.cluster.wire.messages import (
    Abort,
    Beat,
    Hello,
    InstanceFacts,
    Refused,
    TokenRow,
    Tokens,
    Welcome,
    error_of,
    find_difference,
    pack,
    read_instance_message,
    read_router_message,
    refusal_of,
)
from floodplain.cluster.wire.placements import request_of, submit_of
from floodplain.core.codec import WireError
from floodplain.core.errors import PeerLost, QueueFull, RequestRefused, ShuttingDown, UserError
from floodplain.core.plan import TokenLogprobs
from floodplain.core.request import Goals, Request
from floodplain.core.sampling import SamplingParams
from floodplain.engine.outputs import EngineStats, ExpansionFacts
from floodplain.server.requests import CompletionRequest
from tests.support.router_world import unpack
from tests.support.waiting import HANG_S

FACTS = InstanceFacts("1.0", "abc", "float32", 256, 16, 64, "host", 7)


rows = st.builds(
    TokenRow,
    ticket=st.integers(1, 10**9),
    token=st.none() | st.integers(0, 10**6),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    num_cached_tokens=st.integers(0, 10**6),
    logprobs=st.none()
    | st.builds(
        TokenLogprobs,
        chosen=st.floats(max_value=0, allow_nan=False),
        top=st.lists(st.tuples(st.integers(0, 99), st.floats(max_value=0, allow_nan=False)), max_size=3).map(tuple),
    ),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(5, 99),
    min_tokens=st.integers(0, 5),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    request_id=st.text(),
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple),
    params=params,
    arrival_s=st.just(90.0),
    priority=st.integers(-5, 5),
    client=st.text(),
    cache_salt=st.text(),
    session=st.text(),
    goals=st.builds(Goals, ttft_s=st.none() | st.floats(0.1, 9)),
    known_token_ids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    is_accepted=st.booleans(),
    choice_group=st.integers(0, 2**63 - 1),
)


@given(st.lists(rows, max_size=4).map(tuple))
def test_tokens_are_read_as_they_were_written(some: tuple[TokenRow, ...]) -> None:
    message = Tokens(3, some)
    assert read_instance_message(unpack(pack(message))[0]) == message


@given(requests)
def test_a_request_arrives_with_all_its_fields(request: Request) -> None:
    check_arrives(request)


def check_arrives(request: Request) -> None:
    """Except stop strings, which the router matches, and the arrival, which is sent as an age."""
    message = submit_of(request, epoch=4, ticket=5, now=100.0)
    body, token_ids = unpack(pack(message, request.prompt_token_ids + request.known_token_ids))
    read: Any = read_router_message(body)
    again = request_of(read, token_ids, now=7.0)
    assert (read.epoch, read.ticket, again.arrival_s, again.params.stop) == (4, 5, -3.0, ())
    for name in set(Request.__dataclass_fields__) - {"arrival_s", "params"}:
        assert getattr(again, name) == getattr(request, name)
    for name in set(SamplingParams.__dataclass_fields__) - {"stop"}:
        assert getattr(again.params, name) == getattr(request.params, name)


EXTREMES = [0, 1, -1, 20, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 1e-320, 1.0, 100.0, 1e13, 1.7e308, True, "",
            "x" * 1024, "x" * 256, "\x00\n\u2028", "\U0010ffff", [], [0], [2**31 - 1], ["x" * 200],
            {"9999999999": -100}, {"0": 100.0},
            {"type": "json_schema", "json_schema": {"schema": {"title": "\x7f\u20ac"}}}]  # fmt: skip


def test_an_instance_can_read_every_request_that_the_api_accepts() -> None:
    """Otherwise one request would end the connections of all instances, one after the other."""
    accepted = set()
    for field in CompletionRequest.model_fields.keys() - {"model", "prompt"}:
        for value in EXTREMES:
            with suppress(ValidationError, UserError):
                body = CompletionRequest.model_validate({"model": "m", "prompt": [1], "max_tokens": 20, field: value})
                request = Request(
                    request_id=body.request_id or "r",
                    prompt_token_ids=(1,),
                    params=body.sampling(),
                    arrival_s=90.0,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    session=body.session,
                    goals=body.goals,
                )
                accepted.add((field, str(value)))
                check_arrives(request)
    for case in (
        ("repetition_penalty", "1.7e+308"),
        ("ttft_goal_ms", "1.7e+308"),
        ("logit_bias", "{'9999999999': -100}"),
    ):
        assert case in accepted


def test_statistics_arrive_whole() -> None:
    stats = EngineStats(
        num_running=3,
        kv_blocks={"free": 2},
        swap_bytes={("out", "host"): 5, ("in", "peer"): 6},
        recall_times_s=(0.5, 1.0),
        expansion=ExpansionFacts(1.5, limited="why"),
    )
    assert read_instance_message(unpack(pack(Beat(1, stats)))[0]) == Beat(1, stats)
    assert read_instance_message(unpack(pack(Beat(1, EngineStats())))[0]) == Beat(1, EngineStats())


@pytest.mark.parametrize(
    "error", [QueueFull("full"), ShuttingDown("bye"), RequestRefused("long", field="prompt"), UserError("odd")]
)
def test_a_refusal_arrives_as_the_same_exception(error: UserError) -> None:
    read: Any = read_instance_message(unpack(pack(refusal_of(error, 1, 2)))[0])
    again = error_of(read)
    assert (type(again), str(again), getattr(again, "field", None)) == (
        type(error),
        str(error),
        getattr(error, "field", None),
    )


@given(st.data())
def test_a_damaged_message_is_refused_or_is_another_message(data: st.DataObject) -> None:
    """If one field is replaced, reading raises no exception other than ``WireError``."""
    message = data.draw(
        st.sampled_from(
            [
                Hello("t", FACTS),
                Beat(1, EngineStats(kv_blocks={"free": 1})),
                Tokens(1, (TokenRow(1, 2, None, 0, TokenLogprobs(-1.0, ((1, -1.0),)), (TokenLogprobs(-2.0, (), 3),)),)),
                Refused(1, 2, "full", "m", None),
            ]
        )
    )
    body = unpack(pack(message))[0]
    junk = data.draw(st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()) | st.just({}))
    target = body
    while isinstance(target, dict) and target:
        name = data.draw(st.sampled_from(sorted(target)))
        if isinstance(target[name], dict) and target[name] and data.draw(st.booleans()):
            target = target[name]
        else:
            target[name] = junk
            break
    try:
        read = read_instance_message(body)
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert type(read) in (Hello, Beat, Tokens, Refused)


def test_messages_of_the_router_are_refused_from_an_instance() -> None:
    for message in (Welcome(1, 0.2, 1.0), Abort(1, 2)):
        body = unpack(pack(message))[0]
        with pytest.raises(WireError, match="no message of this version"):
            read_instance_message(dict(body))
        assert read_router_message(body) == message


def read_bytes(data: bytes, max_bytes: int) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await FrameLink(reader, None).read(max_bytes)  # type: ignore[arg-type]

    return asyncio.run(read())


def read_blocking(data: bytes) -> Frame:
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(theirs, max_data_bytes=100)
        reading = threads.submit(frames.read)
        ours.settimeout(HANG_S)
        with suppress(OSError):  # refused by its header: the rest is not read
            ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        try:
            return reading.result(HANG_S)
        finally:
            frames.close()


def test_frames_have_their_stated_length_and_are_bounded() -> None:
    frame = CONTROL.pack({"a": 1}, (5, -6))
    assert read_bytes(frame, 100) == ({"a": 1}, (5, -6))
    for cut in range(len(frame)):
        assert read_bytes(frame[:cut], 100) is None
    with pytest.raises(WireError, match="a frame of 16 bytes, of which 15 are allowed"):
        read_bytes(CONTROL.pack({"a": 12}, (5, 6)), 15)
    with pytest.raises(WireError, match="of which 16384"):
        read_bytes(struct.pack("!II", 2**32 - 1, 2**32 - 4), MAX_HELLO_BYTES)  # refused by its header alone


def test_a_frame_that_is_not_whole_in_time_is_none() -> None:
    async def read(data: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        return await FrameLink(reader, None).read(timeout_s=0.0)  # type: ignore[arg-type]

    frame = CONTROL.pack({"a": 1}, (5, -6))
    for cut in (0, 3, len(frame) - 1):
        assert asyncio.run(asyncio.wait_for(read(frame[:cut]), HANG_S)) is None


class SlowPeer:
    """Stands for an asyncio writer: what a test has the peer read is no longer unread."""

    def __init__(self) -> None:
        self.transport, self.num_unread, self.is_aborted = self, 0, False

    def write(self, data: bytes) -> None:
        self.num_unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def test_a_peer_may_be_sent_more_at_once_than_it_may_leave_unread() -> None:
    peer, now = SlowPeer(), [0.0]
    link = FrameLink(None, peer, lambda: now[0])  # type: ignore[arg-type]
    now[0] = 100.0
    for _ in range(40):
        link.send(bytes(MAX_UNSENT_BYTES // 16))
    now[0] += UNREAD_S
    link.send(b"beat")
    assert not peer.is_aborted and peer.num_unread > 2 * MAX_UNSENT_BYTES
    peer.num_unread = MAX_UNSENT_BYTES
    link.send(b"beat")
    now[0] += UNREAD_S
    link.send(b"beat")
    assert not peer.is_aborted
    now[0] += 0.1
    link.send(b"beat")
    assert peer.is_aborted


@given(st.lists(st.integers(0, 4)))
def test_blocks_beside_rows_are_split_in_order(counts: list[int]) -> None:
    rows = [HeldRequest(number, 0, count) for number, count in enumerate(counts)]
    found = split_blocks(rows, range(sum(counts)))
    assert [row for row, _ in found] == rows and [len(blocks) for _, blocks in found] == counts
    assert [block for _, blocks in found for block in blocks] == list(range(sum(counts)))


MALFORMED = {
    "list": (b"[1]", b"", "no JSON object"),
    "number": (b"1", b"", "no JSON object"),
    "nothing": (b"", b"", "no JSON"),
    "cut": (b"{", b"", "no JSON"),
    "two": (b"{}{}", b"", "no JSON"),
    "not UTF-8": (b"\xff", b"", "no JSON"),
    "deep": (b"[" * 50000, b"", "no JSON"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "no JSON"),
    "integers not whole": (b"{}", b"abc", "of which .* are allowed"),
    "nested junk after": (b'{"a": 1} x', b"12345678", "no JSON"),
}


@pytest.mark.parametrize(("text", "integers", "why"), MALFORMED.values(), ids=MALFORMED.keys())
def test_both_readers_refuse_malformed_frames(text: bytes, integers: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        read_bytes(struct.pack("!II", len(text), len(integers)) + text + integers, 2**17)
    with pytest.raises(PeerLost, match=why):
        read_blocking(struct.pack("!IIQ", len(text), len(integers), 0) + text + integers)


@given(st.binary(max_size=40))
def test_both_readers_give_a_frame_or_their_error_for_any_bytes(data: bytes) -> None:
    with suppress(WireError):
        read_bytes(data, 2**17)
    with suppress(PeerLost):
        read_blocking(data)


@given(
    body=st.dictionaries(st.text(), st.none() | st.integers(-(2**63), 2**63) | st.text(), max_size=3),
    integers=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
)
def test_both_readers_read_what_their_format_packs(body: dict[str, Any], integers: list[int]) -> None:
    assert read_bytes(CONTROL.pack(body, integers), 2**17) == (body, tuple(integers))
    long = [number << 32 for number in integers]
    frame = read_blocking(STAGE.pack(body, long, 3) + b"xyz")
    assert (frame.body, frame.integers.tolist(), frame.data.tobytes()) == (body, long, b"xyz")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "2.0", "it is Floodplain 2.0, and the others are 1.0"),
        ("dtype", "bfloat16", "start it with --dtype float32"),
        ("block_tokens", 8, "start it with --block-tokens 16"),
        ("fingerprint", "other", "its model is not the others'"),
        ("max_model_len", 255, "it serves 255 tokens a request, and the others 256: give it more --kv-memory"),
    ],
)
def test_an_unlike_instance_gets_the_difference_in_one_line(name: str, value: object, words: str) -> None:
    fields = {item: getattr(FACTS, item) for item in InstanceFacts.__dataclass_fields__}
    problem = find_difference(FACTS, InstanceFacts(**fields | {name: value}))
    assert problem is not None and words in problem and "\n" not in problem
    assert find_difference(FACTS, InstanceFacts(**fields | {"num_blocks": 5, "max_model_len": 999, "pid": 1})) is None
