"""Arrival times of a trace: numbers, or ISO dates."""

from __future__ import annotations

import math
import re
import reprlib
from datetime import UTC, datetime
from pathlib import Path

from floodplain.core.errors import UserError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceClock:
    """Reads the times of one trace as seconds from one common origin.

    Numbers and dates in one file are refused, because they have no common origin.

    Args:
        path: The file, for errors.
        units_per_s: Units of a number per second: 1000 for milliseconds. Dates have no unit.
    """

    def __init__(self, path: Path, units_per_s: int = 1) -> None:
        self._path = path
        self._units_per_s = units_per_s
        self._has_dates: bool | None = None

    def seconds(self, value: object) -> float:
        """Return seconds. A date's offset from UTC counts; a date without one is in UTC.

        Raises:
            UserError: The value is neither a finite number nor a date, or the file also has the other kind of time.
        """
        text = str(value).strip()
        is_date = False
        try:
            seconds = float(text) / self._units_per_s
        except ValueError:
            is_date, seconds = True, _seconds_of_date(text)
        if not math.isfinite(seconds):
            shown = reprlib.repr(value)
            raise UserError(f"{self._path}: a timestamp must be a number or an ISO date, not {shown}")
        if self._has_dates not in (None, is_date):
            raise UserError(f"{self._path}: some timestamps are numbers and some are dates: write all in one way")
        self._has_dates = is_date
        return seconds


def _seconds_of_date(text: str) -> float:
    """Seconds since 1970 in UTC; not a number if ``text`` is no date."""
    try:
        date = datetime.fromisoformat(re.sub(r"\s*(UTC|GMT)$", "+00:00", text))
    except ValueError:
        return math.nan
    return ((date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH).total_seconds()
