"""JSON bodies: strict Unicode and numbers, a bounded number of parts, validation up to the first fault."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema
from starlette.exceptions import HTTPException

from floodplain.core.errors import UserError
from floodplain.web.errors import ApiError
from floodplain.web.workers import Workers

M = TypeVar("M", bound=BaseModel)

MAX_PARTS = 2**18
"""Most lists, objects and members of a body. The parser cannot be interrupted: so many take it 0.1 s."""


COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""The first bytes of gzip and zstd."""


def parse_json(body: bytes) -> Any:
    """The value of a JSON body, perhaps behind a byte order mark. ApiError if it is not JSON, or has too many parts."""
    may_exceed = len(body) > MAX_PARTS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_PARTS
    if may_exceed and count_parts(body) > MAX_PARTS:
        raise ApiError(400, f"the body holds over {MAX_PARTS} lists, objects and members: send fewer")
    try:
        return pydantic_core.from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        if body.startswith(COMPRESSED):
            raise ApiError(415, "the body is compressed: send it as it is, without Content-Encoding") from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def parse_model(model: type[M], body: bytes, context: object = None) -> M:
    """The value of a JSON body, validated as ``model``.

    Raises ApiError as ``parse_json``, RequestValidationError if it does not fit, or a validator's UserError.
    """
    value = parse_json(body)
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(problems) from None


def count_parts(body: bytes) -> int:
    """The number of lists, objects and members; correct up to where ``body`` is no JSON. Strings do not count."""
    letters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_in_string = np.logical_xor.accumulate(letters == ord('"'))
    begins_part = (letters == ord("[")) | (letters == ord("{")) | (letters == ord(":"))
    return int(np.count_nonzero(begins_part & ~is_in_string))


def _stop_early(schema: Any) -> None:
    """Make a core schema stop at the first fault, in place. pydantic reuses schemas: a second call changes nothing."""
    if not isinstance(schema, dict | list):
        return
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    validator = schema.get("function") if isinstance(schema, dict) else None
    if isinstance(validator, dict) and isinstance(validator["function"], _Cutter):
        return
    for key, part in list(schema.items() if isinstance(schema, dict) else enumerate(schema)):
        if isinstance(part, dict) and part.get("type") == "model-fields":
            _stop_early(list(part["fields"].values()))
            schema[key] = core_schema.no_info_before_validator_function(_Cutter(frozenset(part["fields"])), part)
        elif key not in ("metadata", "serialization"):
            _stop_early(part)


class _Cutter:
    """A validator that keeps an object's known members and one unknown one, which is enough to refuse it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def __call__(self, value: Any) -> Any:
        names = self._names
        if not isinstance(value, dict) or len(value) <= len(names):
            return value
        unknown = next(name for name in value if name not in names)
        return {name: value[name] for name in (*names, unknown) if name in value}


class BoundedModel(BaseModel):
    """A model that validates lists up to the first wrong item, objects up to the first unknown member.

    pydantic by itself makes an error of each: a body of 8 MiB may hold two million, at a kilobyte for each.
    """

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _stop_early(handler.resolve_ref_schema(schema))
        return schema


MAX_INLINE_BYTES = 2**16
"""Larger bodies are read in a thread. So many bytes take a few milliseconds, by which streams may be delayed."""

CONTEXT = "json_context"
"""Attribute of an application's state with the context of validators; optional."""

READERS = Workers(1, "json")
"""Reads large bodies. One thread: the parser holds the GIL, so more would not be faster."""


class JsonRequest(Request):
    """A request whose body is read strictly, as a model."""

    model: Any
    is_large = False

    async def json(self) -> Any:
        """The validated value of the body. Raises ApiError, or ``_InvalidBody`` if it does not fit the model."""
        coding = self.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise ApiError(415, f"Content-Encoding {coding[:32]} is not supported: send the body as it is")
        body, context = await self.body(), getattr(self.app.state, CONTEXT, None)
        try:
            if len(body) <= MAX_INLINE_BYTES:
                return parse_model(self.model, body, context)
            self.is_large = True
            return await READERS.run(parse_model, self.model, body, context)
        except (RequestValidationError, UserError) as error:
            raise _InvalidBody(error) from None


def is_large_body(request: Request) -> bool:
    """Whether a request of a ``JsonRoute`` has a body over ``MAX_INLINE_BYTES``."""
    return isinstance(request, JsonRequest) and request.is_large


class _InvalidBody(HTTPException):
    """Carries a body's validation error through FastAPI, which passes only ``HTTPException`` unchanged."""

    def __init__(self, error: RequestValidationError | UserError) -> None:
        super().__init__(400)
        self.error = error


class JsonRoute(APIRoute):
    """A route whose bodies are read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, which gets a ``JsonRequest``."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                json_request.model = self.body_field.field_info.annotation
            try:
                return await handle(json_request)
            except _InvalidBody as invalid:
                raise invalid.error from None

        return handle_json
