from __future__ import annotations

import codecs
import gzip
import json
import threading
from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from floodplain.core.errors import QueueFull, ShuttingDown, UserError
from floodplain.server.requests import ChatRequest, CompletionRequest
from floodplain.web import bodies
from floodplain.web.bodies import MAX_INLINE_BYTES, BoundedModel, JsonRoute, count_parts, parse_json, parse_model
from floodplain.web.errors import NO_FIELDS, ApiError, RequestFields, error_body, error_response
from tests.support.asgi import call

walked: list[int] = []
"""The thread that validated each value."""


def walk(value: Any) -> Any:
    walked.append(threading.get_ident())
    return value


Item = Annotated[int, BeforeValidator(walk)]


class Part(BoundedModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["part"] = "part"
    value: Item = 0


class Sample(BoundedModel):
    """Lists in every place where a body may have them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    plain: list[Item] | None = None
    short: Annotated[list[Item], Field(max_length=10)] | None = None
    either: str | list[str] | list[Item] | list[list[Item]] | None = None
    parts: list[Part] | None = None
    fields: list[Item] | None = None


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"plain": ["x"] * 50_000}, 1),
        ({"plain": [1] * 7 + ["x"] * 50_000}, 8),
        ({"short": [1] * 50_000}, 11),
        ({"either": [None] * 50_000}, 2),
        ({"either": [[1, None, *[1] * 50_000]]}, 4),
        ({"parts": [{"value": "x"}] * 20_000}, 1),
        ({"parts": [{"value": 1, **{f"x{i}": i for i in range(20_000)}}] * 2}, 1),
        ({f"x{i}": i for i in range(50_000)}, 0),
        ({"fields": ["x"] * 50_000}, 1),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_checking_stops_at_the_first_fault(fields: dict[str, Any], most: int) -> None:
    walked.clear()
    with pytest.raises(RequestValidationError) as caught:
        parse_model(Sample, json.dumps(fields).encode())
    assert len(walked) <= most
    assert len(caught.value.errors()) <= 8


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize("wrong", [-1, None, {}, [-1], {"role": 1}, {"a": 1}, "", ["", 1]])
@pytest.mark.parametrize("name", ["prompt", "messages", "stop", "stop_token_ids", "logit_bias", "tools", "metadata"])
def test_no_number_of_faults_makes_more_than_a_few_errors(model: type[BaseModel], wrong: Any, name: str) -> None:
    fields = {"model": "m", name: [wrong] * 300}
    try:
        parse_model(model, json.dumps(fields).encode())
    except RequestValidationError as error:
        assert len(error.errors()) <= 12


def test_a_schema_that_is_made_again_stays_as_it_was() -> None:
    """pydantic reuses a model's schema: making it stop early once more must not change it."""
    first = len(str(TypeAdapter(list[Sample]).core_schema))
    for _ in range(3):
        again = len(str(TypeAdapter(list[Sample]).core_schema))
    assert again < 1.05 * first


def test_an_unknown_member_is_named_among_any_number() -> None:
    body = json.dumps({"plain": [1], **{f"x{i}": i for i in range(1000)}}).encode()
    with pytest.raises(RequestValidationError) as caught:
        parse_model(Sample, body)
    assert [error["loc"] for error in caught.value.errors()] == [("body", "x0")]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(st.sampled_from('\\"[]{}:,a'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('\\"[]{}:a'), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def parts_of(value: Any) -> int:
    match value:
        case dict():
            return 1 + len(value) + sum(map(parts_of, value.values()))
        case list():
            return 1 + sum(map(parts_of, value))
        case _:
            return 0


@given(values, st.booleans())
def test_parts_are_counted_as_the_parser_would_find_them(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert count_parts(body) == parts_of(value)
    assert parse_json(body) == value


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":1}'])
def test_too_many_parts_are_refused_before_they_are_parsed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(num: int) -> bytes:
        return ('{"a":[' + ",".join([part] * num) + "]}").encode()

    monkeypatch.setattr(bodies, "MAX_PARTS", 1000)
    assert parse_json(body(450))
    assert parse_json(json.dumps({"a": "[{:" * 1000}).encode())
    monkeypatch.setattr(bodies.pydantic_core, "from_json", None)
    with pytest.raises(ApiError, match="over 1000 lists, objects and members"):
        parse_json(body(1000))


@pytest.mark.parametrize("body", [b"[" * 10**5, b'{"a":' * 10**5, b"1" * 10**6, b"NaN", b'"\\ud800"', b"\xff"])
def test_what_is_no_json_is_a_400_in_one_line(body: bytes) -> None:
    with pytest.raises(ApiError, match="not valid JSON") as caught:
        parse_json(body)
    assert caught.value.status_code == 400 and "\n" not in str(caught.value.detail)


def test_a_byte_order_mark_is_skipped_and_compression_is_named() -> None:
    """Files that PowerShell writes begin with the mark."""
    body = b'{"a": 1}'
    assert parse_json(codecs.BOM_UTF8 + body) == {"a": 1}
    for compressed in (gzip.compress(body), b"\x28\xb5\x2f\xfd" + body):
        with pytest.raises(ApiError, match="the body is compressed: send it as it is") as caught:
            parse_json(compressed)
        assert caught.value.status_code == 415


@pytest.mark.parametrize("is_large", [False, True])
def test_large_bodies_are_read_off_the_event_loop(is_large: bool) -> None:
    app = FastAPI()
    app.router.route_class = JsonRoute
    seen: list[Any] = []

    @app.post("/")
    async def take(sample: Sample) -> None:
        seen.append((sample, threading.get_ident()))

    num = MAX_INLINE_BYTES // 2 if is_large else 5
    body = json.dumps({"plain": [1] * num}).encode()
    walked.clear()
    headers = [(b"content-type", b"application/json")]
    assert call(app, method="POST", headers=headers, body=body)[0]["status"] == 200
    assert seen[0][0].plain == [1] * num
    assert len(walked) == num
    assert (set(walked) == {seen[0][1]}) is not is_large


# -- errors ------------------------------------------------------------------------------------------------------------


FIELDS = RequestFields(known=frozenset({"num_bytes"}), unsupported={"echo": "false"})


def problem(field: str, kind: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": ("body", field), "msg": message, "input": True}])


@pytest.mark.parametrize(
    ("error", "fields", "message", "param"),
    [
        (UserError("num_bytes is below 0"), FIELDS, "num_bytes is below 0", "num_bytes"),
        (UserError("num_bytes is below 0"), NO_FIELDS, "num_bytes is below 0", None),
        (UserError("echo is loud"), FIELDS, "echo is loud", None),
        (problem("echo", "extra_forbidden", ""), FIELDS, "echo is not supported: leave it out, or give false", "echo"),
        (problem("echo", "extra_forbidden", ""), NO_FIELDS, "echo is not a supported field: leave it out", "echo"),
        (problem("echo", "literal_error", "Input should be 1"), FIELDS, "echo should be 1, not true", "echo"),
    ],
)
def test_fields_are_known_and_unsupported_as_the_service_states(
    error: Exception, fields: RequestFields, message: str, param: str | None
) -> None:
    detail: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert error_body(error, fields) == (400, {"error": detail})


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(QueueFull("full"), 429, "1"), (ShuttingDown("bye"), 503, "1"), (UserError("no"), 400, None)],
)
def test_only_retryable_errors_have_a_retry_after_header(
    error: Exception, status: int, retry_after: str | None
) -> None:
    response = error_response(error)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)


def test_an_answer_quotes_a_part_of_what_is_long() -> None:
    long = "x" * 10**6
    for error in (UserError(long), ApiError(404, long, param=long), problem(long, "extra_forbidden", long)):
        assert len(error_response(error).body) < 1000


def test_an_internal_failure_discloses_nothing() -> None:
    status, body = error_body(RuntimeError("secret"))
    assert status == 500 and "secret" not in str(body)
