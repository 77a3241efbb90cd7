"""The threads that exchange messages with the coordinator, so that no other thread waits for the network.

One sends heartbeats and its process's messages, and applies the answers; the other waits for news of its leases. While
no coordinator answers, nothing new is borrowed, what is held is kept, and recalls wait.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from floodplain.core.errors import UserError
from floodplain.leases.messages import Join, Message
from floodplain.leases.rows import Reply
from floodplain.leases.states import Outcome
from floodplain.lending.client import CoordinatorClient, CoordinatorUnreachable, NotACoordinator
from floodplain.lending.membership import LentDevice, Membership

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two beats of a member with leases: a recall is known after so long at the latest."""
IDLE_BEAT_S = 5.0
"""Between two beats of a member without leases."""
RETURN_BEAT_S = 0.1
"""Between two beats of a lender with bytes recalled or owed: so soon it can report that it has seen them free."""
BEATS_PER_TTL = 4
"""The least number of beats in a TTL: with one lost beat, the member still counts as alive."""
RETIRE_S = 1.0
"""The most that an ending process waits to see free what its consumers have freed."""
MIN_GAP_S = 0.02
"""Between two exchanges, however many messages there are."""
START_S = 5.0
"""The most that a process waits at its start for the first exchange."""
LAST_WORDS_S = 5.0
"""The most that an ending process waits for the exchange under way, and for each of its last ones."""


def pause_s(membership: Membership, ttl_s: float) -> float:
    """Return the longest time in seconds between two exchanges of a member."""
    wanted_s = BEAT_S if membership.has_leases else IDLE_BEAT_S
    if membership.expects_bytes:
        wanted_s = RETURN_BEAT_S
    return max(RETURN_BEAT_S, min(wanted_s, ttl_s / BEATS_PER_TTL))


class LeaseAgent:
    """``start`` it, ``retire`` it when its process has freed what it borrowed, and ``close`` it.

    Args:
        client: Of the coordinators; the agent's own from now on.
        name: Of the member: of its device.
        device: What it may lend; None lends nothing.
        is_last: No process will have that name after this one: when it has ended, nothing stays owed to it.

    Attributes:
        membership: What the process requests, has and may do.
        problem: Why the coordinator did not answer last; empty if it did.
        failures: Failed exchanges by problem: ``unreachable``, ``refused`` (a token, a message), or ``malformed``.
    """

    def __init__(
        self, client: CoordinatorClient, name: str, device: LentDevice | None = None, *, is_last: bool = False
    ) -> None:
        self.membership = Membership(name, secrets.token_hex(16), device, is_last=is_last)
        self._has_more = threading.Event()
        self.membership.on_change = self._has_more.set
        self.problem = ""
        self.failures: Counter[str] = Counter()
        self._client = client
        self._news = NewsWatch(client.twin(), name, self._has_more.set)
        self._ttl_s = float("inf")
        self._refusal = ""
        self._first: Future[None] = Future()
        self._is_ending, self._has_retired = threading.Event(), threading.Event()
        self._may_leave = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="lease-agent", daemon=True)

    def start(self) -> None:
        """Join, and go on in the background, even without an answer in ``START_S``. UserError if it is refused."""
        self._thread.start()
        try:
            self._first.result(START_S)
        except TimeoutError:
            logger.warning("no coordinator has answered in %g s: leases wait until one does", START_S)
        except UserError:
            self._end()
            raise

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def can_offer(self) -> bool:
        """Whether the coordinator answers, so that an offer would reach it. Callable on any thread."""
        return self.membership.has_joined and not self.problem

    def retire(self) -> None:
        """Stop, and report what is free of the device while it can still be measured (``Lender.say_last``).

        Takes at most ``RETIRE_S``, and ``LAST_WORDS_S`` longer without a coordinator. Safe to call twice.
        """
        self._is_ending.set()
        self._has_more.set()
        if self._has_started and not self._has_retired.wait(RETIRE_S + LAST_WORDS_S):
            self._abandon()

    def close(self) -> None:
        """Send a last message and stop; after ``LAST_WORDS_S`` without it. Safe to call twice."""
        self.retire()
        self._end()
        if not self._has_started:
            self._client.close()

    @property
    def _has_started(self) -> bool:
        return self._thread.ident is not None

    def _end(self) -> None:
        self._is_ending.set()
        self._may_leave.set()
        self._has_more.set()
        if self._has_started and not self._is_abandoned:
            self._thread.join(LAST_WORDS_S)
            if self._thread.is_alive():
                self._abandon()

    def _abandon(self) -> None:
        """Give up on a thread that is stuck, for example resolving a host's name: it ends with the process."""
        if not self._is_abandoned:
            self._is_abandoned = True
            logger.warning("%s ends while an exchange with the coordinator is stuck", self.membership.name)

    def _run(self) -> None:
        try:
            self._begin()
            while not self._is_ending.wait(MIN_GAP_S):
                self._has_more.wait(pause_s(self.membership, self._ttl_s))
                self._has_more.clear()
                self._exchange()
            self._news.close()
            self._say_last()
        finally:
            self._news.close()
            self._has_retired.set()
        self._may_leave.wait()
        self._say_goodbye()

    def _begin(self) -> None:
        """Do the first exchange, for which ``start`` waits: only it raises a refusal."""
        try:
            self._try_exchange()
        except UserError as error:
            self._note_failure(error)
            self._first.set_exception(error)
        except BaseException as error:
            self._first.set_exception(error)
            raise
        else:
            self._first.set_result(None)

    def _say_last(self) -> None:
        """The first exchange also reports on the leases since the last beat."""
        if self._is_abandoned or not self.membership.retire():
            return
        end_s = time.monotonic() + RETIRE_S
        while not self._is_abandoned:
            self._has_more.clear()
            self._exchange()
            if self.problem or self.membership.has_retired or time.monotonic() > end_s:
                return
            self._has_more.wait(RETURN_BEAT_S)

    def _say_goodbye(self) -> None:
        farewell = [] if self._is_abandoned else self.membership.farewell()
        try:
            if farewell:
                self._client.send(farewell)
        except (CoordinatorUnreachable, UserError) as error:
            logger.warning("%s ends without a goodbye, so its leases go on for a TTL: %s", self.membership.name, error)
        finally:
            self._client.close()

    def _exchange(self) -> None:
        try:
            self._try_exchange()
        except UserError as error:
            self._note_failure(error)

    def _try_exchange(self) -> None:
        messages, sent_s = self.membership.collect()
        try:
            answer = self._client.send(messages)
        except CoordinatorUnreachable as error:
            self._note_failure(error)
            return
        self._note_problem("")
        self._ttl_s = answer.ttl_s
        self._note_refusals(messages, answer.replies)
        if self.membership.learn(messages, answer.replies, answer.ttl_s, sent_s):
            self._has_more.set()
        self._news.want(self.membership.has_leases)

    def _note_refusals(self, messages: Sequence[Message], replies: Sequence[Reply]) -> None:
        refusals = []
        for message, reply in zip(messages, replies, strict=True):
            logger.debug("%s: %s %s", self.membership.name, reply.outcome.value, reply.detail)
            is_shut_out = isinstance(message, Join) and reply.outcome is Outcome.DEFERRED
            refusals += [reply.detail] if is_shut_out or reply.outcome is Outcome.CONFLICT else []
        refusal = next(iter(refusals), "")
        if refusal and refusal != self._refusal:
            logger.warning("the coordinator refuses: %s", refusal)
        self._refusal = refusal

    def _note_failure(self, error: CoordinatorUnreachable | UserError) -> None:
        kinds = {CoordinatorUnreachable: "unreachable", NotACoordinator: "malformed"}
        self.failures[kinds.get(type(error), "refused")] += 1
        self._note_problem(str(error))

    def _note_problem(self, problem: str) -> None:
        if problem and not self.problem:
            logger.warning("leases stay as they are for now: %s", problem)
        elif self.problem and not problem:
            logger.info("the coordinator answers again")
        self.problem = problem


WAIT_S = 20.0
"""The longest wait of one request."""
GAP_S = 0.02
"""Between two requests, however much news there is."""
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""The first pause after a failed request, which doubles with each failure, and the longest."""
CLOSING_S = 1.0
"""The most that an ending agent waits for the thread."""


class NewsWatch:
    """The thread that long-polls for news of a member's leases. It starts at the first ``want``, and ``close`` ends it.

    ``on_news`` is called on the thread. Without news, for example from an older coordinator, everything arrives with
    the next beat. The client is its own from now on.
    """

    def __init__(self, client: CoordinatorClient, name: str, on_news: Callable[[], None]) -> None:
        self._client, self._name, self._on_news = client, name, on_news
        self._is_wanted, self._is_closing = threading.Event(), threading.Event()
        self._mark, self._pause_s, self._problem = "", 0.0, ""
        self._thread = threading.Thread(target=self._run, name="lease-news", daemon=True)

    def want(self, is_wanted: bool) -> None:
        """Set whether there can be news, and so whether to wait for it. To be called on one thread."""
        if not is_wanted:
            self._is_wanted.clear()
            if self._is_closing.is_set():
                self._is_wanted.set()
        elif not self._is_closing.is_set():
            self._is_wanted.set()
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Stop. Safe to call twice, and on any thread."""
        self._is_closing.set()
        self._is_wanted.set()
        self._client.hang_up()
        if self._thread.ident is not None:
            self._thread.join(CLOSING_S)  # if it is connecting, it ends with the process

    def _run(self) -> None:
        while not self._is_closing.wait(self._pause_s):
            self._is_wanted.wait()
            if not self._is_closing.is_set():
                self._wait_for_news()
        self._client.close()

    def _wait_for_news(self) -> None:
        began_s = time.monotonic()
        try:
            news = self._client.wait_for_news(self._name, self._mark, WAIT_S)
        except (CoordinatorUnreachable, UserError) as error:
            self._back_off(str(error))
            return
        self._mark = news.mark
        if news.has_news:
            self._on_news()
        elif time.monotonic() - began_s < WAIT_S / 2:
            self._back_off("the coordinator does not wait for news")
            return
        self._pause_s, self._problem = GAP_S, ""

    def _back_off(self, problem: str) -> None:
        """Pause for longer; at random, so that members refused together return at different times."""
        if problem != self._problem and not self._is_closing.is_set():
            logger.debug("%s hears of its leases with its beats for now: %s", self._name, problem)
        self._problem = problem
        most_s = min(MOST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._pause_s = most_s * random.uniform(0.5, 1.0)
