"""Every failure becomes one OpenAI-style error body.

Source: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from floodplain.core.errors import QueueFull, RequestGivenUp, RequestRefused, ShuttingDown, UserError

MAX_MESSAGE_CHARS = 500
MAX_PARAM_CHARS = 100
"""Bounded, because a client may send a field's name of any length."""
RETRY_AFTER_S = 1
"""Seconds in ``Retry-After`` of status 429 and 503: about the time in which a running request ends."""


class ErrorDetail(BaseModel):
    """What went wrong, and which field of the request is to change."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(HTTPException):
    """A failure with an HTTP status, the request's field that must change, and OpenAI's error code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Fields: a UserError that begins with a ``known`` one is about it; ``unsupported`` ones by their off-values."""

    known: frozenset[str] = frozenset()
    unsupported: Mapping[str, str] = field(default_factory=dict)


NO_FIELDS = RequestFields()


def error_body(error: Exception, fields: RequestFields = NO_FIELDS) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the JSON of ``error``."""
    match error:
        case ApiError():
            return error.status_code, _detail(error.status_code, error.detail, error.param, error.code)
        case QueueFull():
            return 429, _detail(429, str(error), None, "rate_limit_exceeded")
        case ShuttingDown():
            return 503, _detail(503, str(error), None, "draining")
        case RequestRefused(field=None):
            return 400, _detail(400, str(error), None, "context_length_exceeded")
        case RequestRefused():
            return 400, _detail(400, str(error), error.field, None)
        case UserError():
            word = re.split(r"\W", str(error), maxsplit=1)[0]  # of "messages.0.content: ...", too
            return 400, _detail(400, str(error), word if word in fields.known else None, None)
        case RequestValidationError():
            message, param = first_problem(error.errors(), fields.unsupported)
            return 400, _detail(400, message, param, None)
        case StarletteHTTPException():
            return error.status_code, _detail(error.status_code, str(error.detail), None, None)
        case RequestGivenUp():
            return 500, _detail(500, str(error), None, "given_up")
        case _:
            return 500, _detail(500, "the server failed; its log says why", None, "internal_error")


def error_response(
    error: Exception, headers: Mapping[str, str] | None = None, fields: RequestFields = NO_FIELDS
) -> Response:
    """The answer for ``error``. ASCII only: a field's name may contain what UTF-8 cannot encode."""
    status, body = error_body(error, fields)
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if isinstance(error, RequestGivenUp):
        retry = {"x-should-retry": "false"}  # obeyed by OpenAI's clients, which repeat other requests with status 500
    return Response(json.dumps(body), status, {**retry, **(headers or {})}, "application/json")


def install_error_handlers(app: FastAPI, fields: RequestFields = NO_FIELDS) -> None:
    """Answer every exception of ``app`` with an error body."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError) or not isinstance(error, StarletteHTTPException):
            headers = error.headers if isinstance(error, ApiError) else None
            return error_response(error, headers, fields)
        where = f"{error.detail}: {request.method} {request.url.path}"
        return error_response(StarletteHTTPException(error.status_code, where), error.headers)

    for kind in (StarletteHTTPException, UserError, RequestValidationError, RequestGivenUp, Exception):
        app.add_exception_handler(kind, handle)


def describe_errors(statuses: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """A service's failures for OpenAPI, from the meaning of each status."""
    listed: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in statuses.items()
    }
    return {**listed, "default": {"model": ErrorBody, "description": "Any other failure."}}


def _detail(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    short_param = None if param is None else param[:MAX_PARAM_CHARS]
    return ErrorBody(
        error=ErrorDetail(message=_one_line(message), type=kind, param=short_param, code=code)
    ).model_dump()


def _one_line(message: str) -> str:
    """A message as one line of bounded length: it may quote a request."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."


BRANCH = "<branch>"
"""Prefix of the tags of our unions, which appear in an error's location but are no part of the body."""


def first_problem(problems: Sequence[Mapping[str, Any]], unsupported: Mapping[str, str]) -> tuple[str, str | None]:
    """(message, field) of the first of pydantic's errors, whose locations begin with the body."""
    problem = problems[0]
    kind, path = problem["type"], _path_of(problem)
    if not path:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    where, param = ".".join(path), path[0]
    if kind == "missing":
        return f"{where} is required", param
    if kind == "extra_forbidden" and path[-1] in unsupported:
        off = unsupported[path[-1]]
        return f"{where} is not supported: leave it out" + (f", or give {off}" if off else ""), param
    if kind == "extra_forbidden":
        return f"{where} is not a supported field: leave it out", param
    return _complaint(where, str(problem["msg"]), problem.get("input")), param


def _path_of(problem: Mapping[str, Any]) -> list[str]:
    path = [str(part) for part in problem["loc"][1:]]
    named = path[-1:] if problem["type"] == "extra_forbidden" else []  # chosen by the client: may look like a tag
    places = path[:-1] if named else path
    return [*(place for place in places if not place.startswith(BRANCH)), *named]


def _complaint(where: str, message: str, given: object) -> str:
    """Pydantic's message as a sentence about the field, with the given value if the message lacks it."""
    wish = re.sub(r"^(Input|List|String|Dictionary|Value error,) (?=should )", "", message)
    wish = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", wish.replace(" after validation", ""))
    if not wish.startswith("should "):
        return f"{where}: {wish}"
    return f"{where} {wish}" if ", not " in wish else f"{where} {wish}, not {_shown(given)}"


def _shown(given: object) -> str:
    match given:
        case dict():
            return "an object"
        case list():
            return "a list"
        case None | bool() | int() | float() | str():
            return json.dumps(given) if given is None or isinstance(given, bool) else reprlib.repr(given)
        case _:
            return f"a {type(given).__name__}"
