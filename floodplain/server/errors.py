"""Errors of the OpenAI endpoints: request fields, statuses, and the error event of a stream."""

from __future__ import annotations

import json
from dataclasses import fields

from floodplain.core.sampling import SamplingParams
from floodplain.server.fields import UNSUPPORTED_FIELDS
from floodplain.server.requests import ChatRequest, CompletionRequest
from floodplain.web.errors import RequestFields, error_body

ERROR_STATUSES = {
    400: "The request cannot be served as it is; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "No such model or path.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "The server failed.",
    503: "The server is stopping.",
}

REQUEST_FIELDS = RequestFields(
    known=frozenset(
        {*CompletionRequest.model_fields, *ChatRequest.model_fields, *(f.name for f in fields(SamplingParams))}
    ),
    unsupported=UNSUPPORTED_FIELDS,
)
"""The fields of both endpoints, and those of ``SamplingParams``, because its errors name them."""


def error_event(error: Exception) -> bytes:
    """``error`` as a server-sent event, for a stream whose status is sent already."""
    return b"data: %s\n\n" % json.dumps(error_body(error, REQUEST_FIELDS)[1]).encode()
