"""The launcher as a router sees it: it admits all slots, and records what the router reports."""

from __future__ import annotations


class FakeSlots:
    """What a router calls of ``cluster.launch.launcher.Launcher``.

    Attributes:
        shut: Slots that are not admitted.
        joined: Slots that joined.
        serving: Slots that served.
        lost: (slot, reason) of lost ones.
    """

    def __init__(self) -> None:
        self.shut: set[int] = set()
        self.joined: list[int] = []
        self.serving: list[int] = []
        self.lost: list[tuple[int, str]] = []

    def admits(self, slot: int) -> bool:
        return slot not in self.shut

    def note_joined(self, slot: int) -> None:
        self.joined.append(slot)

    def note_serving(self, slot: int) -> None:
        self.serving.append(slot)

    def note_lost(self, slot: int, why: str, silent_s: float) -> None:
        assert (silent_s > 0) == (why == "silent") or why != "silent"
        self.lost.append((slot, why))
