"""Unsupported fields of the OpenAI API and vLLM: ignored if they cannot change tokens, else refused by name.

A refused field is accepted at the values that mean "off", so that clients which send the defaults work.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Discriminator, ModelWrapValidatorHandler, PrivateAttr, model_validator

from floodplain.web.bodies import BoundedModel

logger = logging.getLogger(__name__)

Off = Mapping[str, tuple[Any, ...]]
"""Refused fields, each with the values beside null at which it is accepted."""

IGNORED = frozenset(
    {
        "include_reasoning", "metadata", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        "stream_interval", "user",
    }
)  # fmt: skip
"""Fields of a request that cannot change tokens."""

OTHERS = "*"
"""Stands for unknown fields that are ignored: clients choose their names. OpenAI and vLLM ignore those of messages."""


def at_null(*names: str) -> Off:
    """Refused fields that are accepted at null alone."""
    return dict.fromkeys(names, ())


OFF: Off = {
    **at_null(
        "ec_transfer_params", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json",
        "guided_regex", "guided_whitespace_pattern", "kv_transfer_params", "repetition_detection",
        "thinking_token_budget", "truncate_prompt_tokens", "truncation_side",
    ),
    "detokenize": (True,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}  # fmt: skip
"""Refused fields of both endpoints."""


def accepted_values(*tables: Off) -> dict[str, str]:
    """The values of each refused field as text, for errors; none where the tables differ."""
    texts: dict[str, str] = {}
    for table in tables:
        for name, values in table.items():
            text = " or ".join(map(json.dumps, values))
            texts[name] = text if texts.get(name, text) == text else ""
    return texts


def chosen_by(kind_of: Callable[[Any], str | None], message: str) -> Discriminator:
    """Chooses the branch of a union, whose tag ``kind_of`` returns; ``message`` refuses a value of no branch."""
    return Discriminator(kind_of, custom_error_type="branch", custom_error_message=message)


class Body(BoundedModel):
    """A body, or a part of one.

    Fields in ``ignores`` are left out, and so are those in ``off`` at a value that it accepts. Of all other unknown
    fields the first is refused, or with ``ignores_others`` all are ignored, as ``OTHERS``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    off: ClassVar[Off] = {}
    ignores: ClassVar[frozenset[str]] = frozenset()
    ignores_others: ClassVar[bool] = False
    _ignored: frozenset[str] = PrivateAttr(frozenset())

    @property
    def ignored(self) -> frozenset[str]:
        """The fields that were given and ignored."""
        return self._ignored

    @classmethod
    def also_ignores(cls, fields: Mapping[str, Any]) -> frozenset[str]:
        """Further fields that cannot change tokens, given the other ``fields``."""
        return frozenset()

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out(cls, fields: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return validate(fields)
        hints = cls.ignores | cls.also_ignores(fields)
        given = {name for name in hints if fields.get(name) is not None}
        kept = {name: fields[name] for name in cls.model_fields if name in fields}
        known = {*hints, *cls.model_fields}
        for name, value in fields.items():
            if name in known or is_off(cls.off, name, value):
                continue
            if name in cls.off or not cls.ignores_others:
                kept[name] = value  # validation refuses it by name
                break
            given.add(OTHERS)
        body = validate(kept)
        body._ignored = frozenset(given)
        return body

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        properties = schema.setdefault("properties", {})
        properties |= {name: {"enum": [None, *values]} for name, values in cls.off.items()}
        properties |= {name: {} for name in sorted(cls.ignores)}
        return schema | ({"additionalProperties": True} if cls.ignores_others else {})


def is_off(off: Off, name: str, value: object) -> bool:
    """Whether a refused field has a value at which it is accepted. ``true`` is not 1, and ``false`` is not 0."""
    if name not in off:
        return False
    return value is None or any(
        value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in off[name]
    )


MAX_LOGGED = 256
"""Most fields that are logged: clients choose the names of a template's variables."""


class IgnoredFields:
    """Logs each ignored field once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that are new."""
        for name in sorted({*names} - self._logged)[: MAX_LOGGED - len(self._logged)]:
            self._logged.add(name)
            logger.info("the field %s of requests is accepted and ignored: it does not change tokens", name)
