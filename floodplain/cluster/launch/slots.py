"""The interface through which the router notifies the launcher about its own instances."""

from __future__ import annotations

from typing import Protocol


class Slots(Protocol):
    """Notified of the lives of the router's own instances. Slots are numbered from 0."""

    def admits(self, slot: int, /) -> bool:
        """Whether the instance of a slot may join now; if not, it must try again later."""
        ...

    def note_joined(self, slot: int, /) -> None:
        """An instance of a slot joined."""
        ...

    def note_serving(self, slot: int, /) -> None:
        """A slot's instance serves; in a pipeline: all stages are linked."""
        ...

    def note_lost(self, slot: int, why: str, silent_s: float, /) -> None:
        """The life of a slot's instance ended, ``silent_s`` seconds after its last message."""
        ...
