"""A command line as it may be printed: the values of secrets are replaced, whatever their flags are called."""

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
"""Of vLLM: those that its own log hides, too, and whose names do not show why."""

_ABBREVIATED = ("--api-key", "--hf-token")
"""vLLM accepts the beginning of a flag for the flag."""

_MIN_ENVIRONMENT_LENGTH = 6
"""A shorter value of a variable is as likely a word of the command that has nothing to do with it."""

_IN_TEXT = (
    (re.compile(r"(://)\S+(?=@)"), r"\1" + MASK),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret|password)=)[^&\s]+"), r"\1" + MASK),
    (re.compile(r"(?i)\b(bearer |basic )\S+"), r"\1" + MASK),
    (re.compile(r"\b(hf_|sk-)[\w-]{8,}"), r"\1" + MASK),
)
"""Secrets inside of values: of URLs, of headers, and keys that are known by how they begin."""


def mask_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command without its secrets.

    Args:
        words: As they are executed.
        environ: Its variables: a secret that stands in one is hidden wherever it stands.
    """
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
    """One word; inside of a JSON object, each of its values."""
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
