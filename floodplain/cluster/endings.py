"""How a process of a slot ended, and what its log says of that."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import NamedTuple

COMPLAINT = "floodplain: "
"""How the one line begins with which a command says why it ends."""
FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM)
"""How a process ends that an operator, or a system without memory, ended."""
BAD_INPUT = 2
"""The exit status of a command that says what is to be changed."""


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        status: Its exit status; negative: the signal that ended it.
        words: The one line that says why, if it wrote one.
        line: The last line of its log.
    """

    status: int
    words: str | None
    line: str | None = None

    def describe(self) -> str:
        """Why it ended, as far as that is known."""
        if self.words is not None:
            return self.words
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"it was ended by {names.get(-self.status, f'signal {-self.status}')}"
        return f"it ended with status {self.status}" + ("" if self.line is None else f": {self.line}")


class LastWords:
    """What a process's log says of its end: its complaint if there is one, else its last line.

    Args:
        slot: Of the process.
    """

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self.complaint: str | None = None
        self.line: str | None = None

    def take(self, line: str) -> None:
        """Write a line to our standard error, unless it says why the process ends."""
        if line.startswith(COMPLAINT):
            self.complaint = line.removeprefix(COMPLAINT).strip()
            return
        self.line = line.strip() or self.line
        with contextlib.suppress(OSError):
            sys.stderr.write(f"instance {self._slot}: {line}")
            sys.stderr.flush()
