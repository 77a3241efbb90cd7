"""The thread of an engine process that talks to the coordinator, so that nothing else ever waits for it.

It beats, says what its process wants and has done, and learns. While no coordinator answers, everything stays as it is:
nothing new is borrowed, what is held is held on to, and recalls wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from types import TracebackType
from typing import Self

from floodplain.coordinator.client import CoordinatorClient, CoordinatorUnreachable
from floodplain.coordinator.membership import LentDevice, Membership
from floodplain.core.errors import UserError

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two beats of a member that has leases: so soon it hears of a recall."""
IDLE_BEAT_S = 5.0
"""Between two beats of one that has none."""
RETURN_BEAT_S = 0.1
"""Between two beats of a lender whose bytes are on their way back: so soon it may say that it has seen them free."""
BEATS_PER_TTL = 4
"""It beats at least so often in a TTL: a lost beat kills nobody."""
RETIRE_S = 1.0
"""At most so long an ending process waits to see free what its consumers have freed."""
MIN_GAP_S = 0.02
"""Between two exchanges, however much there is to say."""


class LeaseAgent:
    """See the module. ``start`` it, ``retire`` it when its process has freed what it borrowed, and ``close`` it.

    Args:
        client: Of the coordinators; the agent's own from now on.
        name: Of the member: of its device.
        device: What it may lend; None lends nothing.
        is_last: No process will have that name after this one: when it has ended, nothing stays owed to it.

    Attributes:
        membership: What the process wants, has and may do.
        problem: Why the coordinator did not answer last; empty if it did.
    """

    def __init__(
        self, client: CoordinatorClient, name: str, device: LentDevice | None = None, *, is_last: bool = False
    ) -> None:
        self.membership = Membership(name, secrets.token_hex(16), device, is_last=is_last)
        self.membership.on_change = self._wake
        self.problem = ""
        self._client = client
        self._ttl_s = float("inf")
        self._has_more = threading.Event()
        self._closing = threading.Event()
        self._is_retired = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lease-agent", daemon=True)

    def start(self) -> None:
        """Join, and go on in the background. Without a coordinator it goes on trying.

        Raises:
            UserError: The coordinator refuses: the token is wrong, or the name.
        """
        self._exchange()
        self._thread.start()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def retire(self) -> None:
        """Stop, and tell the coordinator what is free of the device, while it can still be looked at: see ``Lender``.

        Takes some milliseconds; at most a second if what was freed cannot be seen free. Safe to call twice.
        """
        if self._is_retired:
            return
        self._is_retired = True
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        if self.membership.retire():
            self._say_last()

    def _say_last(self) -> None:
        """The first exchange tells what has become of the leases since the last beat, so there is always one."""
        end_s = time.monotonic() + RETIRE_S
        try:
            while True:
                self._has_more.clear()
                self._exchange()
                if self.problem or self.membership.has_retired or time.monotonic() > end_s:
                    return
                self._has_more.wait(RETURN_BEAT_S)
        except UserError as error:
            self._note_problem(str(error))

    def close(self) -> None:
        """Say goodbye, and stop. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.retire()
        farewell = self.membership.farewell()
        try:
            if farewell:
                self._client.send(farewell)
        except (CoordinatorUnreachable, UserError) as error:
            logger.warning("%s ends without a goodbye, so its leases go on for a TTL: %s", self.membership.name, error)
        finally:
            self._client.close()

    def _wake(self) -> None:
        self._has_more.set()

    def _run(self) -> None:
        while not self._closing.wait(MIN_GAP_S):
            self._has_more.wait(self._pause_s())
            self._has_more.clear()
            try:
                self._exchange()
            except UserError as error:
                self._note_problem(str(error))

    def _pause_s(self) -> float:
        wanted_s = BEAT_S if self.membership.has_leases else IDLE_BEAT_S
        if self.membership.expects_bytes:
            wanted_s = RETURN_BEAT_S
        return min(wanted_s, self._ttl_s / BEATS_PER_TTL)

    def _exchange(self) -> None:
        messages, sent_s = self.membership.collect()
        try:
            answer = self._client.send(messages)
        except CoordinatorUnreachable as error:
            self._note_problem(str(error))
            return
        self._note_problem("")
        self._ttl_s = answer.ttl_s
        for reply in answer.replies:
            if reply.detail:
                logger.debug("%s: %s", self.membership.name, reply.detail)
        if self.membership.learn(messages, answer.replies, answer.ttl_s, sent_s):
            self._wake()

    def _note_problem(self, problem: str) -> None:
        if problem and not self.problem:
            logger.warning("leases stay as they are for now: %s", problem)
        elif self.problem and not problem:
            logger.info("the coordinator answers again")
        self.problem = problem
