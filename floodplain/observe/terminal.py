"""What the command line writes on the terminal and into its log: nothing that a terminal would obey."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from types import TracebackType

from floodplain.core.errors import WriteFailed
from floodplain.core.printable import printable, printable_lines
from floodplain.files.results import writing

MAX_LINE = 1000
"""Letters of an error that are printed."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(__name__)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def say(text: str, screen_codes: str = "") -> None:
    """Print a result at once. Without a standard output nothing is printed.

    Args:
        text: Shown with control characters escaped.
        screen_codes: Our own, which the terminal obeys.

    Raises:
        WriteFailed: Standard output is full, or its reader is gone.
    """
    try:
        with writing("standard output"):
            print(screen_codes + printable_lines(text), flush=True)
    except WriteFailed:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - the interpreter writes the rest when it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def announce(text: str) -> None:
    """Say that a service is ready. One whose standard output cannot be written serves all the same."""
    try:
        say(text)
    except WriteFailed as error:
        logger.warning("%s: %s", error, text)


def complain(message: str) -> None:
    """Print one line of bounded length on standard error."""
    line = " ".join(message.split())
    with suppress(OSError):  # standard error may be full, or its reader gone: the status tells
        print(f"floodplain: {printable(line[:MAX_LINE])}{'…' if len(line) > MAX_LINE else ''}", file=sys.stderr)


class LineFormatter(logging.Formatter):
    """A log entry is one line, whatever its arguments hold; the lines of a traceback follow."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """The traceback."""
        return printable_lines(super().formatException(ei))


class SafeRecord(logging.LogRecord):
    """A log entry for any handler: libraries have handlers of their own, and quote the files that they read."""

    def getMessage(self) -> str:  # noqa: N802
        """The message, perhaps of several lines."""
        return printable_lines(super().getMessage())


def start_logging(is_quiet: bool) -> None:
    """Log on standard error: warnings, and what our own parts tell unless ``is_quiet``."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.setLogRecordFactory(SafeRecord)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("floodplain").setLevel(logging.WARNING if is_quiet else logging.INFO)
