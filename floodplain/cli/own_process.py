"""Runs a user's code in a child process: it may exit, or be killed for its memory."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from floodplain.cluster.launch.parent import signal_at_parents_end
from floodplain.core.errors import UserError

T = TypeVar("T")

_INTERRUPTED = 130


def in_own_process(work: Callable[[], T], what: str) -> T:
    """The result of ``work`` in a forked child, which then exits without waiting for its threads.

    Call it before torch is imported: the child has only the calling thread.

    Args:
        work: A function whose result can be pickled.
        what: Name of the work, with which errors begin.

    Raises:
        UserError: ``work`` raised one; or it ended its process.
        KeyboardInterrupt: It, or this process, was interrupted.
    """
    with os.fdopen(os.memfd_create("result"), "w+b") as result:
        child = os.fork()
        if child == 0:
            _work(work, result.fileno())
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        result.seek(0)
        said = result.read()
    code = os.waitstatus_to_exitcode(status)
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code or not said:
        raise UserError(f"{what} ended its process {_how(code)}")
    value, refusal = pickle.loads(said)  # written by our own code
    if refusal is not None:
        raise UserError(refusal)
    return value  # type: ignore[no-any-return]


def _work(work: Callable[[], object], fd: int) -> NoReturn:
    status = 1
    outcome: tuple[object, str | None]
    try:
        signal_at_parents_end(signal.SIGKILL)
        with os.fdopen(fd, "wb") as result:
            try:
                outcome = work(), None
            except UserError as error:
                outcome = None, str(error)
            pickle.dump(outcome, result)
        status = 0
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit status {code}: it must return instead"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = ", perhaps for want of memory: give a smaller --max-batch" if -code == signal.SIGKILL else ""
    return f"by {name}{hint}"
