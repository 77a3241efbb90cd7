from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from floodplain.core.errors import QueueFull, ShuttingDown, UserError
from floodplain.web.errors import NO_FIELDS, ApiError, RequestFields, error_body, error_response

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
