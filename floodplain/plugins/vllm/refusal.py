"""Ends a process of vLLM at a refusal with one line on stderr, wherever in vLLM the refusal is raised."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from floodplain.core.errors import UserError
from floodplain.plugins.vllm.compat_names import FAILED_START

BAD_USAGE = 2

_MARK = "_FLOODPLAIN_REFUSED"
"""Environment variable with the path of a file: a process creates it at a refusal, for its parent to find."""


class Refusal(UserError, SystemExit):
    """The plug-in refuses something. A program may catch it as any error; uncaught it ends the process quietly.

    vLLM would print a traceback of some hundred lines in each of its processes. ``code`` is the exit status.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = BAD_USAGE


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Print a ``UserError`` that is raised in the context in one line, and raise it as a ``Refusal``."""
    try:
        yield
    except Refusal:
        raise
    except UserError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"floodplain: {line}\n")
        _leave_mark()
        raise Refusal(line) from None


def _leave_mark() -> None:
    if isinstance(sys.excepthook, _QuietEnd):
        return  # no process of vLLM's started this one
    with suppress(KeyError, OSError):  # one more traceback is no reason to fail in another way
        os.close(os.open(os.environ[_MARK], os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def end_quietly_after_refusals() -> None:
    """Let this process end without a traceback if an engine process that it starts ends by a ``Refusal``.

    That process has printed the line by then. vLLM raises a ``RuntimeError`` here, which a program may still catch. If
    called again, it forgets earlier refusals.
    """
    if isinstance(sys.excepthook, _QuietEnd):
        sys.excepthook.forget()
    elif _MARK not in os.environ or multiprocessing.parent_process() is None:
        # An engine process is vLLM's child by multiprocessing: its parent is the one to end quietly. Any other process
        # may have inherited the variable from a program that has nothing to do with this vLLM.
        sys.excepthook = _QuietEnd(sys.excepthook)


class _QuietEnd:
    """A ``sys.excepthook`` that calls the previous one, except for starts that ended by a refusal."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before
        self._mark = Path(tempfile.gettempdir()) / f"floodplain-refused-{secrets.token_hex(8)}"
        os.environ[_MARK] = str(self._mark)

    def forget(self) -> bool:
        """Return whether a process started from here has refused since the last call."""
        was_refused = self._mark.exists()
        self._mark.unlink(missing_ok=True)
        return was_refused

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.forget() and FAILED_START in str(error):
            raise SystemExit(BAD_USAGE)
        self._before(kind, error, trace)
