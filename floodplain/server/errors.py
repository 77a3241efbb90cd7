"""Every failure becomes one OpenAI-style error body.

Source: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from floodplain.core.errors import QueueFull, RequestRefused, ShuttingDown, UserError
from floodplain.core.sampling import SamplingParams
from floodplain.server.requests import UNSUPPORTED_FIELDS, ChatRequest, CompletionRequest
from floodplain.server.responses import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What a refused client is told to wait: about the time in which a running request ends."""

ERROR_STATUSES = {
    400: "The request cannot be served as it is; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "No such model or path.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "The server failed.",
    503: "The server is stopping.",
}

_KNOWN_FIELDS = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *(f.name for f in fields(SamplingParams))}


class ApiError(HTTPException):
    """A failure that knows its HTTP status, the field of the request that is to change, and OpenAI's code for it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param
        self.code = code


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
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
            word = str(error).partition(" ")[0]
            return 400, _detail(400, str(error), word if word in _KNOWN_FIELDS else None, None)
        case RequestValidationError():
            message, param = _first_problem(error.errors())
            return 400, _detail(400, message, param, None)
        case StarletteHTTPException():
            return error.status_code, _detail(error.status_code, str(error.detail), None, None)
        case _:
            return 500, _detail(500, "the server failed; its log says why", None, "internal_error")


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """``error`` as an answer. ASCII only: a field's name may hold what UTF-8 cannot."""
    status, body = error_body(error)
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return Response(json.dumps(body), status, {**retry, **(headers or {})}, "application/json")


def error_event(error: Exception) -> bytes:
    """``error`` as a server-sent event, for a stream whose status is sent already."""
    return b"data: %s\n\n" % json.dumps(error_body(error)[1]).encode()


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of ``app`` with an error body."""
    for kind in (StarletteHTTPException, UserError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError) or not isinstance(error, StarletteHTTPException):
        return error_response(error)
    where = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(StarletteHTTPException(error.status_code, where), error.headers)


def _detail(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump()


def _first_problem(problems: Sequence[Any]) -> tuple[str, str | None]:
    """(message, field) for the first field that is wrong; of a union, what each member wants."""
    path = [str(part) for part in problems[0]["loc"][1:]]
    if not path:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    param, kind = path[0], problems[0]["type"]
    if kind == "missing":
        return f"{'.'.join(path)} is required", param
    if kind == "extra_forbidden":
        return f"{'.'.join(path)} is not a supported field: leave it out", param
    if param in UNSUPPORTED_FIELDS:
        return f"{param} is not supported: leave it out", param
    wanted = [str(p["msg"]).removeprefix("Input should be ") for p in problems if str(p["loc"][1]) == param]
    return f"{param} should be {', or '.join(dict.fromkeys(wanted))}", param
