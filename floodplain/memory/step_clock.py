"""Measures how long compute takes for the layers of a step, and how long it waits for copies of them."""

from __future__ import annotations

from floodplain.memory.layer_line import LayerLine, Mark, Ticket


class StepClock:
    """Times steps by the marks of a line. Where compute runs behind its caller, times are known only later.

    Args:
        line: Line whose copies compute waits for.

    Attributes:
        stall_s: Seconds for which compute waited, as far as they are known.
    """

    def __init__(self, line: LayerLine) -> None:
        self.stall_s = 0.0
        self._line = line
        self._waits: list[tuple[Mark, Mark]] = []  # waits whose duration is not known yet
        self._begin: Mark | None = None  # of the last step
        self._end: Mark | None = None
        self._begin_stall_s = 0.0

    def begin_step(self) -> None:
        """Mark the begin of a step; the previous step has ended."""
        self._note_waits()
        self._begin, self._end, self._begin_stall_s = self._line.mark(), None, self.stall_s

    def end_step(self) -> None:
        """Mark the end of a step, when compute has been given all of it."""
        self._end = self._line.mark()

    def wait(self, ticket: Ticket) -> None:
        """Make compute wait for a copy, and time the wait."""
        begin = self._line.mark()
        self._line.wait(ticket)
        self._waits.append((begin, self._line.mark()))
        self._note_waits()

    def take_step_s(self) -> float:
        """Compute time of the last step in seconds, without waits; 0 if it was taken before.

        Called after the step has ended: ``stall_s`` then includes all of its waits.
        """
        self._note_waits()
        begin, end = self._begin, self._end
        self._begin = self._end = None
        step_s = None if begin is None or end is None else self._line.elapsed_s(begin, end)
        return 0.0 if step_s is None else max(0.0, step_s - (self.stall_s - self._begin_stall_s))

    def _note_waits(self) -> None:
        while self._waits and (wait_s := self._line.elapsed_s(*self._waits[0])) is not None:
            self.stall_s += wait_s
            del self._waits[0]
