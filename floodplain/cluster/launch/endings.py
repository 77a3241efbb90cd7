"""How a slot's process ended, and the reason from its log."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import NamedTuple

COMPLAINT = "floodplain: "
"""Prefix of the one line in which a command says why it exits."""
FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM)
"""Statuses of a process that was ended by an operator, or by the kernel for lack of memory."""
BAD_INPUT = 2
"""The exit status of a command with wrong input; its complaint says what to change."""


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        status: Its exit status; negative: the signal that ended it.
        words: The one line in which it says why; None if there is none.
        line: The last line of its log.
    """

    status: int
    words: str | None
    line: str | None = None

    def describe(self) -> str:
        """Why the process ended, as far as is known."""
        if self.words is not None:
            return self.words
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"it was ended by {names.get(-self.status, f'signal {-self.status}')}"
        return f"it ended with status {self.status}" + ("" if self.line is None else f": {self.line}")


class LastWords:
    """The reason of a process's end from its log: its complaint if there is one, else its last line.

    Args:
        slot: Of the process.
    """

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self.complaint: str | None = None
        self.line: str | None = None

    def take(self, line: str) -> None:
        """Copy a line to our standard error; a complaint is kept instead."""
        if line.startswith(COMPLAINT):
            self.complaint = line.removeprefix(COMPLAINT).strip()
            return
        self.line = line.strip() or self.line
        with contextlib.suppress(OSError):
            sys.stderr.write(f"instance {self._slot}: {line}")
            sys.stderr.flush()
