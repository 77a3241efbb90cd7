"""The command line's output to terminal and log, with control characters escaped."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from floodplain.core.errors import WriteFailed
from floodplain.core.printable import printable, printable_lines
from floodplain.files.results import writing
from floodplain.observe.start_log import PROGRESS

MAX_LINE = 1000
CLEAR = "\033[H\033[J"
CLEAR_LINE = "\r\033[K"
PLAIN_S, REDRAW_S = 5.0, 0.1
"""Least seconds before an entry of progress: after any line of a file or pipe, and on a terminal, which replaces it."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(__name__)

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def say(text: str, screen_codes: str = "") -> None:
    """Print a result, with control characters escaped, after ``screen_codes``. Raises WriteFailed if that fails."""
    try:
        with writing("standard output"):
            print(screen_codes + _encodable(printable_lines(text)), flush=True)
    except WriteFailed:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - the interpreter writes the rest when it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def _encodable(text: str) -> str:
    """The text, with all but ASCII escaped as in JSON if standard output has no encoding for it (``LC_ALL``)."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return re.sub(r"[^\0-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


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
    before = CLEAR_LINE if sys.stderr is not None and sys.stderr.isatty() else ""  # a line of progress may be there
    with suppress(OSError):  # standard error may be full or closed: the status shows it
        print(f"{before}floodplain: {printable(line[:MAX_LINE])}{'…' if len(line) > MAX_LINE else ''}", file=sys.stderr)


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


class ProgressHandler(logging.StreamHandler[TextIO]):
    """Writes entries as lines. Those of level ``PROGRESS`` replace each other on a terminal; elsewhere they are few."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter())
        self._is_screen = self.stream is not None and self.stream.isatty()
        self._is_drawn = False
        self._written_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Write an entry, unless it is of progress and the last one was written just now."""
        if record.levelno == PROGRESS:
            if record.created < self._written_s + (REDRAW_S if self._is_screen else PLAIN_S):
                return
            record.levelname = logging.getLevelName(logging.INFO)
        self._written_s = record.created
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The entry's text; on a terminal progress is its message alone, which fits a row."""
        before = CLEAR_LINE if self._is_drawn else ""
        self._is_drawn = self._is_screen and record.levelno == PROGRESS
        self.terminator = "" if self._is_drawn else "\n"
        return before + (record.getMessage() if self._is_drawn else super().format(record))


class SafeRecord(logging.LogRecord):
    """A log entry safe for any handler: libraries have their own handlers, and quote files that they read."""

    def getMessage(self) -> str:  # noqa: N802
        """The message, perhaps of several lines, with control characters escaped."""
        return printable_lines(super().getMessage())


def start_logging(is_quiet: bool) -> None:
    """Log to standard error: warnings, and our own informational entries and progress unless ``is_quiet``."""
    logging.setLogRecordFactory(SafeRecord)
    logging.basicConfig(handlers=[ProgressHandler()], level=logging.WARNING)
    logging.getLogger("floodplain").setLevel(logging.WARNING if is_quiet else PROGRESS)
