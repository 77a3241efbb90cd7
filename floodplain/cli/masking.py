"""Masks the values of secrets in a command line, so that it can be printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET_NAMES = {
    "apikey", "key", "keys", "token", "password", "passwd", "passphrase", "secret", "secrets",
    "credential", "credentials", "auth", "authorization", "bearer",
}  # fmt: skip
"""Last words of names whose values are secrets. A file that holds one ends in another word."""

_SECRET_FLAGS = {"--watermark-config"}
"""Flags of vLLM that its own log masks too, and whose names do not look secret."""

_ABBREVIATED = ("--api-key", "--hf-token")
"""Flags that vLLM accepts abbreviated."""

_MIN_ENVIRONMENT_LENGTH = 6
"""Shorter values of variables are not searched for: they may equal an unrelated word of the command."""

_IN_TEXT = (
    (re.compile(r"(://)\S+(?=@)"), r"\1" + MASK),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password)=)[^&\s]+"), r"\1" + MASK),
    (re.compile(r"(?i)\b(bearer |basic )\S+"), r"\1" + MASK),
    (re.compile(r"\b(hf_|sk-)[\w-]{8,}"), r"\1" + MASK),
)
"""Patterns of secrets inside values: in URLs, in headers, and keys with known prefixes."""


def mask_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command with its secrets masked; also the values of secret variables, wherever they appear."""
    known = sorted(
        (v for k, v in environ.items() if _is_secret(k) and len(v) >= _MIN_ENVIRONMENT_LENGTH), key=len, reverse=True
    )
    shown, hides = [], False
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            hides = _is_secret(name) and not equals
            is_hidden = equals and _is_secret(name)
            shown.append(name + equals + (MASK if is_hidden else _mask_value(value, known)))
        else:
            shown.append(MASK if hides else _mask_value(word, known))
    return shown


def _is_secret(name: str) -> bool:
    """Whether the value of a flag, a variable or a key of an object is a secret."""
    name = name.lower().replace("_", "-").rstrip("+")
    is_short = len(name) > len("--a") and any(flag.startswith(name) for flag in _ABBREVIATED)
    is_flag = name.startswith("--") and (is_short or name.partition(".")[0] in _SECRET_FLAGS)
    return is_flag or re.split(r"[-.\s]", name)[-1] in _SECRET_NAMES


def _mask_value(text: str, known: Sequence[str]) -> str:
    """One word with its secrets masked; in a JSON object, in each of its values."""
    if text.startswith(("{", "[")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return _mask_text(text, known)
        masked = _mask_object(found, known)
        return text if masked == found else json.dumps(masked)
    return _mask_text(text, known)


def _mask_object(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: MASK if _is_secret(key) else _mask_object(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mask_object(inner, known) for inner in value]
    return _mask_text(value, known) if isinstance(value, str) else value


def _mask_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text
