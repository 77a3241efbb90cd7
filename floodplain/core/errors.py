"""Exceptions: user errors, which say what to change; lost peers or results; bugs, never caught. Scarcity is a value."""

from __future__ import annotations


class UserError(Exception):
    """Bad usage or input. One line that says what to change: printed with exit status 2, or answered with 400."""


def flag_name(name: str) -> str:
    """A setting's name as a flag of the command line: ``max_num_seqs`` is ``--max-num-seqs``."""
    return f"--{name.replace('_', '-')}"


class SettingRefused(UserError):
    """A setting is out of its range. The message has its name as in Python; front ends raise ``as_flags``."""

    def __init__(self, names: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{' and '.join(names)} {problem}")
        self._names, self._problem = names, problem

    def as_flags(self) -> UserError:
        """The same error with names of command-line flags."""
        return UserError(f"{' and '.join(map(flag_name, self._names))} {self._problem}")


class RequestRefused(UserError):
    """A request that can never be served; ``field`` is the field to change, None if it is too long as a whole."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(UserError):
    """The waiting queue is at ``max_waiting``: try again later (the server answers 429)."""


class ShuttingDown(UserError):
    """The engine accepts nothing new (the server answers 503)."""


class PeerLost(Exception):
    """A process that computes with this one exited or sent invalid data; their joint work is aborted."""


class RequestGivenUp(RuntimeError):
    """Instances ended one after the other under a request, which may be the cause: a client must not send it again."""


class WriteFailed(Exception):
    """The result of finished work cannot be written: the command line prints the line and exits with status 1."""


class ServiceLost(Exception):
    """All instances of a server have ended: the command line prints the line and exits with status 1."""


class InvariantError(RuntimeError):
    """A broken invariant, which is a bug. It is never caught and ends the process."""
