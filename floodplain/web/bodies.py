"""JSON bodies: strict Unicode and numbers, a bounded number of parts, validation up to the first fault."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pydantic_core
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from floodplain.web.errors import ApiError

M = TypeVar("M", bound=BaseModel)

MAX_PARTS = 2**18
"""Most lists, objects and members of a body. The parser cannot be interrupted: so many take it 0.1 s."""


def parse_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        ApiError: It is not JSON, or has too many parts.
    """
    if _may_exceed_parts(body) and count_parts(body) > MAX_PARTS:
        raise ApiError(400, f"the body holds over {MAX_PARTS} lists, objects and members: send fewer")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def parse_model(model: type[M], body: bytes, context: object = None) -> M:
    """The value of a JSON body, validated as ``model``.

    Args:
        model: The model; its validators may also raise ``UserError``.
        body: JSON.
        context: The context of the validators.

    Raises:
        ApiError: It is not JSON, or has too many parts.
        RequestValidationError: It does not fit the model.
        UserError: Raised by a validator.
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


def _may_exceed_parts(body: bytes) -> bool:
    return len(body) > MAX_PARTS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_PARTS


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
    """A model whose lists are checked up to the first wrong item, and whose objects up to the first unknown member.

    pydantic by itself makes an error of each: a body of 8 MiB may hold two million, at a kilobyte for each.
    """

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _stop_early(handler.resolve_ref_schema(schema))
        return schema
