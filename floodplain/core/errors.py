"""Kinds of error: the user's, which say what to change; peers and results that are lost; and ours, never caught.

Scarcity (no free block, no free page) is neither: it is a value that the caller must handle.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad usage or bad input. The message is one line that says what to change.

    The command line prints it and exits with status 2; the server answers 400 with it.
    """


class SettingRefused(UserError):
    """A setting is out of its range. The message has its name as in Python; a front end with flags raises ``as_flags``.

    Args:
        names: Of the settings.
        problem: What is wrong with them; the line goes on with it.
    """

    def __init__(self, names: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{' and '.join(names)} {problem}")
        self._names, self._problem = names, problem

    def as_flags(self) -> UserError:
        """The same of flags of the command line."""
        flags = [f"--{name.replace('_', '-')}" for name in self._names]
        return UserError(f"{' and '.join(flags)} {self._problem}")


class RequestRefused(UserError):
    """A request that can never be served, refused when it arrives, with the numbers in the message.

    Args:
        message: What to change.
        field: The field of the request that is to change; None if it is too long as a whole.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(UserError):
    """The waiting queue is at ``max_waiting``: try again later (the server answers 429)."""


class ShuttingDown(UserError):
    """The engine accepts nothing new (the server answers 503)."""


class PeerLost(Exception):
    """Another process that computes with this one is gone, or speaks nonsense: what they did together is over."""


class WriteFailed(Exception):
    """Work was done, and its result cannot be written: the command line prints the line and exits with status 1."""


class ServiceLost(Exception):
    """All that computes for a server is gone: the command line prints the line and exits with status 1."""


class InvariantError(RuntimeError):
    """The program contradicts itself: a bug of ours. Nobody catches it; it ends the process loudly."""
