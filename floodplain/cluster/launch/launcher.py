"""Instance processes of the router: it starts them, restarts them when they end, and leaves none behind.

A slot is the place of one process. The launcher decides; ``Processes`` (``processes``, ``ray_processes``) acts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from floodplain.cluster.launch.processes import BAD_INPUT, FROM_OUTSIDE, Ending
from floodplain.web.accepting import SCARCE

FIRST_DELAY_S, MOST_DELAY_S = 0.1, 30.0
SETTLED_S = 1.0
"""An instance that served for less time counts as a failed start."""
CALM_S = 60.0
"""After an instance served for so long, the delay is reset."""
MAX_FAILED_STARTS = 5
"""After so many failed starts in a row it is not restarted."""


class Restarts:
    """The restarts of one slot: delays double, and failed starts in a row (``num_failed``) are bounded."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._num_short = 0

    def next_delay_s(self, served_s: float | None) -> float | None:
        """The seconds until the restart after an end; None: no restart. ``served_s`` is None if it never served."""
        self.num_failed = self.num_failed + 1 if served_s is None or served_s < SETTLED_S else 0
        if self.num_failed >= MAX_FAILED_STARTS:
            return None
        if served_s is not None and served_s >= CALM_S:
            self._num_short = 0
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0**self._num_short)
        self._num_short = min(self._num_short + 1, 16)
        return delay_s


logger = logging.getLogger(__name__)

LOST_TIMEOUT_S = 30.0
"""A child that fell silent and has not joined again after this time is killed and restarted."""
PARTED_TIMEOUT_S = 300.0
"""The same for a session that ended otherwise: the child may be reading dropped layers, or in a long step, or exit."""
FIRST_RETRY_S = 1.0
"""Delay after a start that failed for lack of system resources; doubled each time."""


class Processes(Protocol):
    """Where the processes of slots run. Everything is called on one event loop."""

    @property
    def num_slots(self) -> int:
        """The number of slots; they are numbered from 0."""

    async def run(self, slot: int, address: str, token: str) -> Ending:
        """Run a slot's process until it ends; its log goes to our standard error. ``OSError`` if it cannot start."""

    def kill(self, slot: int) -> None:
        """Kill a slot's process, if there is one: its ``run`` returns."""

    async def close(self) -> None:
        """End all processes: ask, wait, kill. Tasks that await ``run`` were cancelled before."""


class Lost(NamedTuple):
    """How a session of a slot's instance ended.

    ``words`` is empty for ``left``, ``pipeline`` and ``group``: the reason is elsewhere. ``served_s`` are the seconds
    for which it served, up to its last message; None if it never served.
    """

    words: str
    served_s: float | None


class Launcher:
    """Starts and restarts the processes of all slots. Everything is called on one event loop.

    A start has failed if its process ended, or its instance was lost, before it had served for ``SETTLED_S``. A process
    that was lost may join again by itself, as a stopped one does: it is admitted again when its delay is over.

    ``on_change``: called when a slot's instance serves, is lost, or its process has ended. True if it may be restarted.

    Attributes:
        tokens: Each slot's secret, and the slot.
        last_words: Why the last start of a slot failed, or its instance ended.
        refused: Slots whose last process ended for bad input: another start would fail too.
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
        self._again_s: dict[int, float] = {}  # when a lost instance may join again; inf: never
        self._killed: set[int] = set()
        self._killings: dict[int, asyncio.TimerHandle] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def start(self, address: str) -> None:
        """Start all slots. Each instance joins the router at this address once its model is loaded."""
        slots = {slot: token for token, slot in self.tokens.items()}
        self._keepers = [asyncio.create_task(self._keep(slot, slots[slot], address)) for slot in sorted(slots)]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._on_change())

    @property
    def failure(self) -> BaseException | None:
        """A bug that keeps a slot from being restarted; None while there is none."""
        ended = [keeper.exception() for keeper in self._keepers if keeper.done() and not keeper.cancelled()]
        return next((error for error in ended if error is not None), None)

    # -- notifications of the router --------------------------------------------------------------------------------

    def admits(self, slot: int) -> bool:
        """Whether the instance of a slot may join now; if not, it must try again later."""
        lost = self._lost.get(slot)
        if lost is not None and lost.words and slot not in self._again_s:
            self._judge(slot, lost.served_s, lost.words)
            if slot in self.given_up:
                self._kill(slot)
        return time.monotonic() >= self._again_s.get(slot, 0.0)

    def note_joined(self, slot: int) -> None:
        """An instance of this slot joined; before it serves it may have to be linked with others."""
        self._forget(slot)

    def note_serving(self, slot: int) -> None:
        """The slot's instance serves; in a pipeline: all stages are linked."""
        self._serving_since_s[slot] = time.monotonic()
        self.serving.add(slot)
        self._on_change()

    def note_lost(self, slot: int, why: str, silent_s: float) -> None:
        """The session of the slot's instance ended, ``silent_s`` seconds after its last message.

        ``why``: ``silent``: it may be stopped or hung; ``stuck``: it is killed; ``hung_up``; any other is no reason.
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
        else:
            self._kill_later(slot, PARTED_TIMEOUT_S)
        self._lost[slot] = Lost(words, served_s)
        self._on_change()

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all processes. None is restarted."""
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
        """Decide when the slot may start or join again, after a session or a process ended."""
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
            served_s = max(served_s, SETTLED_S)  # a signal from outside does not count as a failed start
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
                if _is_scarce(error):  # does not count as a failed start
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
    """Whether the system has no resources for a process now, or for the thread that waits for its end."""
    return error.errno in SCARCE if isinstance(error, OSError) else str(error) == "can't start new thread"
