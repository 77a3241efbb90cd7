"""What a front tells of its own instances to what starts their processes."""

from __future__ import annotations

from typing import Protocol


class Slots(Protocol):
    """What hears of the lives of the front's own instances. Slots are numbered from 0."""

    def admits(self, slot: int, /) -> bool:
        """Whether the instance of a slot may join now; if not, it is to ask again."""
        ...

    def note_joined(self, slot: int, /) -> None:
        """An instance of a slot joined."""
        ...

    def note_serving(self, slot: int, /) -> None:
        """It serves; of a pipeline: all of its stages are linked."""
        ...

    def note_lost(self, slot: int, why: str, silent_s: float, /) -> None:
        """Its life ended, after a silence of so many seconds."""
        ...
