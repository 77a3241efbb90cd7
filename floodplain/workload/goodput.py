"""Service-level objectives of one request: ``ttft:MS tpot:MS e2el:MS``, as in ``vllm bench serve``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from floodplain.core.errors import UserError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Return the limit in milliseconds of every named metric; empty for no texts.

    Raises:
        UserError: An unknown name, a name given twice, or no positive number.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = math.nan
        if name not in GOODPUT_METRICS or not (math.isfinite(limit_ms) and limit_ms > 0):
            raise UserError(f"goodput must read like ttft:500 tpot:50 e2el:10000 (milliseconds), not {text!r}")
        if name in limits:
            raise UserError(f"goodput names {name} twice")
        limits[name] = limit_ms
    return limits
