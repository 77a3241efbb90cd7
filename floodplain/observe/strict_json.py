"""JSON that every parser reads: no NaN, no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from floodplain.files.results import write_result


def to_json(result: Mapping[str, Any]) -> str:
    """Strict JSON: floats that are not finite are null, other values their text, lone surrogates escaped."""
    text = json.dumps(_strict(result), indent=1, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _strict(value: Any) -> Any:
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _strict(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_strict(entry) for entry in value]
        case np.generic():
            return _strict(value.item())
        case _:
            return str(value)


def save_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as strict JSON, whole or not at all. Raises WriteFailed."""
    write_result(path, to_json(result) + "\n")
