"""The command line's output to terminal and log, with control characters escaped."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from floodplain.core.errors import WriteFailed
from floodplain.core.printable import printable, printable_lines
from floodplain.files.results import writing

MAX_LINE = 1000
"""Most characters of a printed error."""
CLEAR = "\033[H\033[J"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(__name__)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def say(text: str, screen_codes: str = "") -> None:
    """Print a result, with control characters escaped, after ``screen_codes``. Raises WriteFailed if that fails."""
    try:
        with writing("standard output"):
            print(screen_codes + printable_lines(text), flush=True)
    except WriteFailed:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - the interpreter writes the rest when it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def say_again(look: Callable[[], str | None], every_s: float | None, *, clears: bool) -> int:
    """Print what ``look`` returns, each ``every_s`` seconds (None: once) on a cleared screen; 1 if it returned None."""
    while True:
        text = look()
        if text is not None:
            is_screen = clears and every_s is not None and sys.stdout is not None and sys.stdout.isatty()
            say(text, CLEAR if is_screen else "")
        if every_s is None:
            return 1 if text is None else 0
        time.sleep(every_s)


def announce(text: str) -> None:
    """Print that a service is ready. If standard output cannot be written, log a warning instead."""
    try:
        say(text)
    except WriteFailed as error:
        logger.warning("%s: %s", error, text)


def complain(message: str) -> None:
    """Print one line of bounded length on standard error."""
    line = " ".join(message.split())
    with suppress(OSError):  # standard error may be full or closed: the status tells
        print(f"floodplain: {printable(line[:MAX_LINE])}{'…' if len(line) > MAX_LINE else ''}", file=sys.stderr)


class LineFormatter(logging.Formatter):
    """Formats a log entry as one line, whatever its arguments; the lines of a traceback follow."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The entry's line, with control characters escaped."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """The traceback, with control characters escaped."""
        return printable_lines(super().formatException(ei))


class SafeRecord(logging.LogRecord):
    """A log entry safe for any handler: libraries have their own handlers, and quote files that they read."""

    def getMessage(self) -> str:  # noqa: N802
        """The message, perhaps of several lines, with control characters escaped."""
        return printable_lines(super().getMessage())


def start_logging(is_quiet: bool) -> None:
    """Log to standard error: warnings, and our own informational entries unless ``is_quiet``."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.setLogRecordFactory(SafeRecord)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("floodplain").setLevel(logging.WARNING if is_quiet else logging.INFO)
