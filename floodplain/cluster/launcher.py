"""Instance processes of the front: started by it, started again when they end, and never left behind.

A slot is the place of one of them. The launcher decides when its process starts, starts again, or is killed;
``Processes`` does it: on this machine (``local_processes.py``), or on those of a Ray cluster (``ray_processes.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from floodplain.cluster.endings import BAD_INPUT, FROM_OUTSIDE, Ending
from floodplain.cluster.restarts import MAX_FAILED_STARTS, MOST_DELAY_S, SETTLED_S, Restarts
from floodplain.web.accepting import SCARCE

logger = logging.getLogger(__name__)

LOST_TIMEOUT_S = 30.0
"""A child that fell silent and does not join again within this time is killed, and another one started."""
PARTED_TIMEOUT_S = 300.0
"""The same of one whose life ended otherwise: it may read dropped layers again, or end a long step."""
FIRST_RETRY_S = 1.0
"""After a process that could not be started because the system had no room for it; then twice as long each time."""


class Processes(Protocol):
    """Where the processes of slots run. Everything is called on one event loop."""

    @property
    def num_slots(self) -> int:
        """Slots are numbered from 0."""
        ...

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Start a slot's process, and return when it has ended; its log goes to our standard error.

        Args:
            slot: Which; it has no process.
            address: Of the front.
            token: With which it joins.

        Raises:
            OSError: It cannot be started.
        """
        ...

    def kill(self, slot: int) -> None:
        """Kill a slot's process, if there is one: its ``run`` returns."""
        ...

    async def close(self) -> None:
        """End all: ask, wait, kill. Tasks that await ``run`` were cancelled before."""
        ...


class Lost(NamedTuple):
    """How a life of a slot's instance ended.

    Attributes:
        words: Why; empty if it is not the reason itself.
        served_s: For how many seconds it served and was heard; None if it never served.
    """

    words: str
    served_s: float | None


class Launcher:
    """See the module. Everything is called on one event loop.

    A start has failed if its process ended, or its instance was lost, before it had served for ``SETTLED_S``. A process
    that was lost may come back by itself, as one that was stopped does: it is let in again when its delay is over.

    Args:
        processes: Of all slots; ``close`` closes them.
        on_change: Called when a slot's instance serves, or its process has ended; whether it may start again.
        lost_timeout_s: As ``LOST_TIMEOUT_S``.

    Attributes:
        tokens: Each slot's secret, and the slot.
        serving: Slots whose instance serves.
        last_words: Why the last start of a slot failed, or its instance ended.
        refused: Slots whose last process ended for bad input: no other start would do better.
        given_up: Slots that are not started again.
    """

    def __init__(
        self, processes: Processes, on_change: Callable[[], bool], lost_timeout_s: float = LOST_TIMEOUT_S
    ) -> None:
        self.tokens = {secrets.token_urlsafe(32): slot for slot in range(processes.num_slots)}
        self.serving: set[int] = set()
        self.last_words: dict[int, str] = {}
        self.refused: set[int] = set()
        self.given_up: set[int] = set()
        self._processes = processes
        self._on_change = on_change
        self._lost_timeout_s = lost_timeout_s
        self._restarts = [Restarts() for _ in range(processes.num_slots)]
        self._serving_since_s: dict[int, float] = {}
        self._lost: dict[int, Lost] = {}
        self._again_s: dict[int, float] = {}  # when what was lost may be back; inf: never
        self._killed: set[int] = set()
        self._killings: dict[int, asyncio.TimerHandle] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, address: str) -> None:
        """Start all slots; each joins the front at this address when it has loaded its model."""
        slots = {slot: token for token, slot in self.tokens.items()}
        self._keepers = [asyncio.create_task(self._keep(slot, slots[slot], address)) for slot in sorted(slots)]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._on_change())

    @property
    def failure(self) -> BaseException | None:
        """A bug of ours that keeps a slot from being started again; None while all is well."""
        ended = [keeper.exception() for keeper in self._keepers if keeper.done() and not keeper.cancelled()]
        return next((error for error in ended if error is not None), None)

    # -- what the front says of a slot -----------------------------------------------------------------------------

    def admits(self, slot: int) -> bool:
        """Whether the instance of a slot may join now; if not, it is to ask again."""
        lost = self._lost.get(slot)
        if lost is not None and lost.words and slot not in self._again_s:
            self._judge(slot, lost.served_s, lost.words)
            if slot in self.given_up:
                self._kill(slot)
        return time.monotonic() >= self._again_s.get(slot, 0.0)

    def note_joined(self, slot: int) -> None:
        """An instance of this slot joined; it may have to be linked with others before it serves."""
        self._forget(slot)

    def note_serving(self, slot: int) -> None:
        """It serves."""
        self._serving_since_s[slot] = time.monotonic()
        self.serving.add(slot)
        self._on_change()

    def note_lost(self, slot: int, why: str, silent_s: float) -> None:
        """Its life ended, after a silence of so many seconds.

        Args:
            slot: Of the instance.
            why: ``silent``: it may be stopped or wedged; ``stuck``: it is killed; ``hung_up``; else it is not the
                reason itself.
            silent_s: Since it was heard last.
        """
        served_s, words = self._count_served_s(slot), "it hung up" if why == "hung_up" else ""
        self.serving.discard(slot)
        if why == "silent":
            served_s = None if served_s is None else max(0.0, served_s - silent_s)
            when = " while it started" if served_s is None or served_s < SETTLED_S else ""
            words = f"it missed its beats for {silent_s:.1f} s{when}"
            self._kill_later(slot, self._lost_timeout_s)
        elif why == "stuck":
            words = "it beat and computed nothing (--stall-timeout)"
            self._kill(slot)
        elif why != "left":
            self._kill_later(slot, PARTED_TIMEOUT_S)
        self._lost[slot] = Lost(words, served_s)
        self._on_change()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all processes. Nothing is started again."""
        for slot in list(self._killings):
            self._spare(slot)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._processes.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _spare(self, slot: int) -> None:
        killing = self._killings.pop(slot, None)
        if killing is not None:
            killing.cancel()

    def _forget(self, slot: int) -> None:
        """Nothing of an earlier life counts any more."""
        self._spare(slot)
        self._lost.pop(slot, None)
        self._again_s.pop(slot, None)
        self._killed.discard(slot)

    def _kill_later(self, slot: int, timeout_s: float) -> None:
        self._spare(slot)
        self._killings[slot] = asyncio.get_running_loop().call_later(timeout_s, self._kill_lost, slot, timeout_s)

    def _kill_lost(self, slot: int, timeout_s: float) -> None:
        logger.warning("instance %d has not joined again for %g s: it is killed", slot, timeout_s)
        self._kill(slot)

    def _kill(self, slot: int) -> None:
        self._killed.add(slot)
        self._processes.kill(slot)

    def _count_served_s(self, slot: int) -> float | None:
        since_s = self._serving_since_s.pop(slot, None)
        return None if since_s is None else time.monotonic() - since_s

    def _judge(self, slot: int, served_s: float | None, words: str) -> None:
        """A life ended, or a process did: when the next one may begin."""
        restarts = self._restarts[slot]
        delay_s = restarts.next_delay_s(served_s)
        self.last_words[slot] = words
        if delay_s is None:
            self.given_up.add(slot)
        self._again_s[slot] = math.inf if delay_s is None else time.monotonic() + delay_s
        if not self._on_change():
            return
        what = f"start {restarts.num_failed} of {MAX_FAILED_STARTS} failed" if restarts.num_failed else "it ended"
        again = "it is not started again" if delay_s is None else f"it starts again in {delay_s:g} s"
        logger.warning("instance %d: %s: %s; %s", slot, what, words, again)

    def _judge_ending(self, slot: int, ending: Ending) -> None:
        lost = self._lost.get(slot)
        served_s = self._count_served_s(slot) if lost is None else lost.served_s
        if ending.status in FROM_OUTSIDE and slot not in self._killed and served_s is not None:
            served_s = max(served_s, SETTLED_S)  # whatever ended it from outside says nothing of its start
        words = ending.describe()
        if lost is not None and lost.words and slot in self._killed:
            words = lost.words
        if ending.status == BAD_INPUT:
            self.refused.add(slot)
        self._judge(slot, served_s, words)

    async def _keep(self, slot: int, token: str, address: str) -> None:
        num_short = 0
        while True:
            self._forget(slot)
            self.refused.discard(slot)
            try:
                ending = await self._processes.run(slot, address, token)
            except (OSError, RuntimeError) as error:
                if _is_scarce(error):  # no start has failed
                    delay_s = min(MOST_DELAY_S, FIRST_RETRY_S * 2.0**num_short)
                    num_short = min(num_short + 1, 8)
                    logger.warning("instance %d cannot be started now: %s; it is tried again in %g s",
                                   slot, getattr(error, "strerror", None) or error, delay_s)  # fmt: skip
                    await asyncio.sleep(delay_s)
                    continue
                if isinstance(error, RuntimeError):
                    raise
                ending = Ending(-1, str(error))
            num_short = 0
            self._spare(slot)
            self.serving.discard(slot)
            if slot not in self._again_s:
                self._judge_ending(slot, ending)
            if slot in self.given_up or not self._on_change():
                return
            await asyncio.sleep(self._again_s[slot] - time.monotonic())


def _is_scarce(error: OSError | RuntimeError) -> bool:
    """Whether there is no room for a process now, or for the thread that waits for its end."""
    return error.errno in SCARCE if isinstance(error, OSError) else str(error) == "can't start new thread"
