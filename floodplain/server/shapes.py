"""Request fields that allow several types: each value is checked only as the type that it appears to be.

So an error states what is wrong with the value, not the other types that it could have.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo

from floodplain.server.prompt_limit import PromptLimit
from floodplain.web.errors import BRANCH
from floodplain.web.gate import REQUEST_ID

MAX_PROMPTS = 256
"""Most prompts in one completion request."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Bounded, because each new token's text is compared with all stop strings, on the engine's thread."""

TEXT, TEXTS, TOKENS, TOKEN_LISTS = (f"{BRANCH} {name}" for name in ("text", "texts", "tokens", "token lists"))

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

RequestId = Annotated[str, Field(pattern=REQUEST_ID)]
"""A client's name of a request."""


def kind_of_text(value: object) -> str | None:
    """The branch of a text or a list of texts; None for other values."""
    return TEXT if isinstance(value, str) else TEXTS if isinstance(value, list) else None


def _kind_of_prompt(value: object) -> str | None:
    """The branch of a prompt. A list's branch is decided by its first item."""
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else None
    first = value[0] if value else ""
    return TOKENS if isinstance(first, int | float) else TOKEN_LISTS if isinstance(first, list) else TEXTS


_StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopText, Tag(TEXT)] | Annotated[list[_StopText], Field(max_length=MAX_STOPS), Tag(TEXTS)],
    Discriminator(
        kind_of_text, custom_error_type="stop", custom_error_message="should be a string or a list of strings"
    ),
]


def _check_fits(value: object, info: ValidationInfo) -> object:
    """Refuse too many tokens by their number, before any token is validated."""
    if isinstance(value, list) and isinstance(info.context, PromptLimit):
        info.context.check(len(value), f"{len(value)} prompt tokens")
    return value


Tokens = Annotated[list[TokenId], Field(min_length=1), BeforeValidator(_check_fits)]
Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[Tokens, Tag(TOKENS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TOKEN_LISTS)],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="should be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]
