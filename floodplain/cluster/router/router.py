"""The router's side of all connections: admits instances, sends them requests, and detects dead and stuck ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from floodplain.cluster.groups.controller import GroupController
from floodplain.cluster.launch.launcher import Launcher
from floodplain.cluster.migration.controller import MigrationController
from floodplain.cluster.pipeline.forming import Forming, find_problem
from floodplain.cluster.router.door import Door
from floodplain.cluster.router.monitor import Monitor
from floodplain.cluster.router.requests import Requests
from floodplain.cluster.router.stalls import StallGuard, StallWatch
from floodplain.cluster.settings import BEATS_PER_TIMEOUT
from floodplain.cluster.state.request_table import RequestTable
from floodplain.cluster.state.roster import Instance, Roster
from floodplain.cluster.sums import StatsTable
from floodplain.cluster.wire import messages as wire
from floodplain.cluster.wire.frames import FrameLink
from floodplain.cluster.wire.messages import KvHeld, KvPulled, RequestStopped
from floodplain.core.codec import WireError
from floodplain.core.lifecycle import EndedRequest
from floodplain.core.ranges import MAX_TOKEN_ID
from floodplain.cost.model_shape import ModelShape

logger = logging.getLogger(__name__)

MOST_BEAT_S = 1.0
"""Longest time between two beats: an instance hangs up on a router that is silent for a few of them, and changes of
groups and the load are looked at with each."""


class Router:
    """The router's state and its connections. Everything is called on one event loop.

    Args:
        silence_s: An instance that sends nothing for so long is declared dead.
        tokens: Secrets that admit an instance, each with its slot; None: an instance that was started elsewhere.
        on_finished: Called with each request that ended by ``stop`` or ``length``.
        num_stages: Its own instances are the stages of a pipeline of so many; None: each serves by itself.
        shape: Of the model whose layers instances may drop; None: they drop none.
        migrates: Whether running requests migrate between instances, which then drop no layers.

    ``num_ends``: ended sessions, by reason. ``monitor`` forms groups by load; set by the caller. None: operators do.
    """

    def __init__(
        self,
        silence_s: float,
        tokens: Mapping[str, int | None],
        launcher: Launcher,
        on_finished: Callable[[EndedRequest], None],
        num_stages: int | None = None,
        shape: ModelShape | None = None,
        *,
        migrates: bool = False,
        vocab_size: int = MAX_TOKEN_ID + 1,
        stall_timeout_s: float | None = None,
    ) -> None:
        self.table = RequestTable(Roster(silence_s))
        self.sums = StatsTable()
        self.num_ends: Counter[str] = Counter()
        self.requests = Requests(self.table, self.send, on_finished, vocab_size)
        self._beat_s, self._silence_s = min(MOST_BEAT_S, silence_s / BEATS_PER_TIMEOUT), silence_s
        self._tokens = tokens
        self._door: Door | None = None
        self._forming: Forming | None = None
        if num_stages is not None:
            self._forming = Forming(num_stages, self.table.roster, self.send)
        self.group_controller: GroupController | None = None
        self.monitor: Monitor | None = None
        if shape is not None:
            self.group_controller = GroupController(self.table, shape, self.send, self._end, self.requests.place)
        self.migration_controller: MigrationController | None = None
        if migrates:
            self.migration_controller = MigrationController(self.table, self.send, self.requests.place)
        self._controller = self.group_controller or self.migration_controller
        if self._controller is not None:
            self.requests.on_closed = self._controller.forget
        watch = StallWatch(stall_timeout_s, self._beat_s)
        self._stalls = StallGuard(watch, self.table.roster, self._forming, self.group_controller)
        self._launcher = launcher
        self._links: dict[int, FrameLink] = {}
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def failure(self) -> BaseException | None:
        """A bug that stops the router from working; None while there is none."""
        ended = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        return next((error for error in ended if error is not None), self._failure)

    @property
    def is_ready(self) -> bool:
        """Whether an instance has joined; with a pipeline: whether all stages were linked once."""
        return self.table.roster.first_facts is not None and (
            self._forming is None or self._forming.max_model_len is not None
        )

    # -- start and end ---------------------------------------------------------------------------------------------

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket, and start to watch the instances."""
        self._door = Door(sock, self._tokens, self._welcome)
        self._door.open()
        self._tasks.add(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Disconnect all instances, which then abort their requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._door is not None:
            await self._door.shut()

    async def _watch(self) -> None:
        while True:
            for epoch, link in list(self._links.items()):
                link.send(wire.pack(wire.FrontBeat(epoch)))
            for epoch in self.table.roster.find_silent(time.monotonic()):
                self._end(epoch, "silent")
            for stuck in self._stalls.find_stuck():
                logger.warning("%s %s: its requests go on elsewhere", self.table.roster.get(stuck.epoch), stuck.words)
                self._end(stuck.epoch, "stuck")
            for watcher in (self._controller, self.monitor):
                if watcher is not None:
                    watcher.look(time.monotonic())
            await asyncio.sleep(self._beat_s)

    def send(self, epoch: int, message: wire.RouterMessage, token_ids: Sequence[int] = ()) -> None:
        """Send a message and integers to the instance of an epoch; does nothing if its session has ended."""
        link = self._links.get(epoch)
        if link is not None:
            link.send(wire.pack(message, tuple(token_ids)))

    # -- connections -----------------------------------------------------------------------------------------------

    async def _welcome(self, link: FrameLink) -> None:
        door, epoch = self._door, None
        assert door is not None
        try:
            hello = await door.read_hello(link)
            epoch = None if hello is None else self._admit(hello, door.find_slots(hello.token), link)
            if epoch is not None:
                await self._listen(epoch, link)
        except WireError as error:
            logger.warning("an instance is hung up on: %s", error)
        except asyncio.CancelledError:  # evicted for a new connection, or the router closes
            link.abort()
        except Exception as error:
            self._failure = error
            raise
        finally:
            if epoch is not None:
                self._end(epoch, "hung_up")
            await link.close()

    def _admit(self, hello: wire.Hello, slots: Sequence[int | None], link: FrameLink) -> int | None:
        """The epoch of the new session; None if the instance is refused. ``slots``: the slot of its token, if known."""
        if not slots:
            why = "the router does not know this token: give the --instance-token-file that it has"
            link.send(wire.pack(wire.Denied(why)))
            return None
        if not self.is_ready if slots[0] is None else not self._launcher.admits(slots[0]):
            return None  # it connects again: the router's own instances decide the model
        problem = find_problem(hello, slots[0], self.table.roster.first_facts, self._forming)
        if problem is not None:
            link.send(wire.pack(wire.Denied(f"the router does not take this instance: {problem}")))
            return None
        instance = self.table.roster.join(hello.facts, slots[0], time.monotonic(), hello.stage)
        instance.can_drop, instance.can_move = hello.can_drop, hello.can_move
        self._links[instance.epoch] = link
        link.send(wire.pack(wire.Welcome(instance.epoch, self._beat_s, self._silence_s)))
        logger.info("%s joins: process %d on %s", instance, hello.facts.pid, hello.facts.host)
        if self._forming is not None and instance.stage is not None:
            older = self._forming.join(instance)
            if older is not None:
                self._end(older, "hung_up")
        if instance.slot is not None:
            self._launcher.note_joined(instance.slot)
        self._note_serving([instance])
        self.requests.place()
        return instance.epoch

    async def _listen(self, epoch: int, link: FrameLink) -> None:
        while (frame := await link.read()) is not None:
            message = wire.read_instance_message(frame[0])
            if isinstance(message, wire.Hello):
                raise WireError("it says hello twice")
            if message.epoch == epoch:
                if not self.table.roster.hear(epoch, time.monotonic()):
                    return
                self._take(epoch, message, frame[1])

    def _end(self, epoch: int, why: str) -> None:
        instance = self.table.roster.get(epoch)
        if instance is None:
            return
        self._links.pop(epoch).abort()
        self.sums.retire(epoch)
        why = "left" if instance.is_leaving and why not in ("silent", "stuck") else why
        self.num_ends[why] += 1
        entries = self.table.end(epoch)
        logger.info("%s is gone (%s); requests that go on elsewhere: %d", instance, why, len(entries))
        if instance.slot is not None and all(one.slot != instance.slot for one in self.table.roster):
            self._launcher.note_lost(instance.slot, why, time.monotonic() - instance.heard_s)
        for entry in entries:
            self.requests.give_back(entry)
        for other in [] if self._forming is None else self._forming.end(epoch):
            self._end(other, "pipeline")
        if self._controller is not None:
            self._controller.end(epoch)
        self.requests.place()

    # -- messages --------------------------------------------------------------------------------------------------

    def _take(self, epoch: int, message: wire.EpochMessage, integers: tuple[int, ...]) -> None:
        match message:
            case wire.Tokens():
                self.requests.take_tokens(message)
            case wire.Beat():
                self.sums.note(epoch, message.stats)
                instance = self.table.roster.expect(epoch)
                instance.num_blocks = message.stats.num_blocks or instance.num_blocks  # a stage alone has no ledger
                self._stalls.hear(instance, message.progress, time.monotonic())
            case wire.Accepted():
                self.requests.take_acceptance(message)
            case wire.Refused():
                self.requests.take_refusal(message)
            case wire.Leaving():
                self.table.roster.expect(epoch).is_leaving = True
            case wire.Formed():
                self._take_formed(message)
            case KvHeld() | KvPulled() | RequestStopped():
                if self.migration_controller is not None:
                    self.migration_controller.take(message, integers)
            case _ if self.group_controller is not None:
                self.group_controller.take(message, integers)

    def _take_formed(self, message: wire.Formed) -> None:
        facts = self.table.roster.first_facts
        if self._forming is None or facts is None or not self._forming.link(message):
            return
        self.table.roster.first_facts = replace(facts, max_model_len=self._forming.max_model_len or 0)
        self._note_serving(self.table.roster)
        self.requests.place()

    def _note_serving(self, instances: Iterable[Instance]) -> None:
        for one in instances:
            if one.slot is not None and one.can_serve and not one.was_serving:
                one.was_serving = True
                self._launcher.note_serving(one.slot)
