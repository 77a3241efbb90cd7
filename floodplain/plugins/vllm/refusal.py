"""How a refusal ends a process of vLLM: with one line on stderr, wherever in vLLM it is raised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from floodplain.core.errors import UserError

BAD_USAGE = 2


class Refusal(UserError, SystemExit):
    """What the plug-in does not do. A program may catch it as any error; uncaught it ends the process quietly.

    vLLM would print a traceback of some hundred lines in each of its processes.

    Attributes:
        code: The exit status.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = BAD_USAGE


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """A ``UserError`` in here is printed in one line, and goes on as a ``Refusal``."""
    try:
        yield
    except Refusal:
        raise
    except UserError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"floodplain: {line}\n")
        raise Refusal(line) from None
