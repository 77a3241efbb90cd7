"""The child's side of ``launcher``: reads the token from the router's pipe, and exits with the router."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.web.bearer import read_secret

_PR_SET_PDEATHSIG = 1
END_TIMEOUT_S = 5.0


def read_token(source: str) -> str:
    """The token of an instance, from a file of secrets, or for ``-`` from the first line of standard input.

    With ``-``, this process exits when standard input ends, and with the process that started it. Raises ``UserError``
    if there is no token, or others may read the file.
    """
    if source != "-":
        return read_secret(Path(source), "instance token file")
    signal_at_parents_end(signal.SIGKILL)
    token = sys.stdin.readline().strip()
    if not token:
        raise UserError("--instance-token-file - needs a token on standard input")
    threading.Thread(target=_end_with_input, name="floodplain-router", daemon=True).start()
    return token


def signal_at_parents_end(number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends, even if this one is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_TIMEOUT_S)
    os._exit(1)
