"""An engine's part in lending and borrowing: its agent, what it lends, and what it borrows."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from floodplain.lending.agent import LeaseAgent
from floodplain.lending.client import CoordinatorClient
from floodplain.lending.lent_pool import LentPool
from floodplain.lending.near_layers import NearLayers
from floodplain.lending.peer_tier import PeerTier
from floodplain.lending.pool_lender import PoolLender
from floodplain.lending.requests import LOOK_S
from floodplain.web.bearer import read_secret

MOST_RECALL_TIMES = 1000
"""Durations that are kept, of the last recalls; metrics are read more often than so many recalls end."""
_MOST_HOST_LETTERS = 40


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """Figures of an engine's leases.

    Attributes:
        num_bytes: By (``producer`` or ``consumer``, the other end) of leases that have not ended.
        num_recalls: Recalls that have ended; ``recall_times_s`` has at most ``MOST_RECALL_TIMES`` of them.
        num_failed_growths: How often bytes that ought to be free were not, when the pool was to grow.
        num_borrowed: A consumer's leases by outcome, since the start (``PeerTotals``).
        failed_exchanges: By problem (``LeaseAgent.failures``).
    """

    num_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    num_recalls: int = 0
    recall_times_s: tuple[float, ...] = ()
    num_failed_growths: int = 0
    num_borrowed: Mapping[str, int] = field(default_factory=dict)
    failed_exchanges: Mapping[str, int] = field(default_factory=dict)


class Neighbours:
    """Runs an engine's agent, lender and borrowers. ``close`` it when the engine's memory is freed.

    ``agent`` is not yet started. ``hurry`` replaces the borrowers' own: its own thread calls it at any news of leases.

    ``on_news``: called on the agent's thread whenever there is news: a boundary should come soon.
    """

    def __init__(
        self,
        agent: LeaseAgent,
        lent_pool: LentPool | None = None,
        lender: PoolLender | None = None,
        peer_tier: PeerTier | None = None,
        near_layers: NearLayers | None = None,
        hurry: Callable[[], float | None] | None = None,
    ) -> None:
        self.agent, self.lent_pool, self.lender = agent, lent_pool, lender
        self.peer_tier, self.near_layers = peer_tier, near_layers
        self._borrowers = [one for one in (peer_tier, near_layers) if one is not None]
        self._watch = PeerWatch(hurry or self._hurry) if self._borrowers else None
        self._recall_times_s: deque[float] = deque(maxlen=MOST_RECALL_TIMES)
        self._num_recalls = 0
        self._mutex = threading.Lock()
        self._has_news = False  # set before ``on_news``, so that the boundary it causes sees it
        self.on_news: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Join, and go on in the background; UserError if the coordinator refuses the token or the name."""
        self.agent.membership.on_news = self._note_news
        if self._watch is not None:
            self._watch.start()
        self.agent.start()

    def retire(self) -> None:
        """Free what is borrowed and settle what was lent, before the engine's memory is freed. Safe to call twice."""
        if self._watch is not None:
            self._watch.close()
        for borrower in self._borrowers:
            borrower.close()
        self.agent.retire()

    def close(self) -> None:
        """End the membership, when the engine has freed its memory. Safe to call twice."""
        self.retire()
        self.agent.close()

    @property
    def rest_s(self) -> float:
        """Return how long the next boundary may wait if no step causes one: 0 while boundaries move memory."""
        if self.lender is not None and self.lender.is_moving:
            return 0.0
        return LOOK_S if self.peer_tier is not None and self.peer_tier.is_leaving else float("inf")

    def at_boundary(self, now: float) -> None:
        """Do everything that is due to memory; no step is outstanding. Seldom takes more than a microsecond."""
        if self.lender is not None:
            self.lender.at_boundary(now)
        has_news, self._has_news = self._has_news, False
        for borrower in self._borrowers:
            if has_news:
                borrower.look()
            borrower.at_boundary(now)

    def facts(self) -> LeaseFacts:
        """Return figures of the leases now; callable on any thread."""
        membership = self.agent.membership
        with self._mutex:
            new = membership.take_recall_times()
            self._recall_times_s.extend(new)
            self._num_recalls += len(new)
            return LeaseFacts(
                membership.lease_bytes(),
                self._num_recalls,
                tuple(self._recall_times_s),
                0 if self.lent_pool is None else self.lent_pool.num_failed_growths,
                self._count_borrowed(),
                dict(self.agent.failures),
            )

    def _note_news(self) -> None:
        self._has_news = True
        if self._watch is not None:
            self._watch.wake()
        self.on_news()

    def _hurry(self) -> float | None:
        return min((s for borrower in self._borrowers if (s := borrower.hurry()) is not None), default=None)

    def _count_borrowed(self) -> dict[str, int]:
        outcomes: Counter[str] = Counter()
        for borrower in self._borrowers:
            outcomes.update(borrower.totals.by_outcome())
        return dict(outcomes)


def open_client(addresses: str, token_file: str | None) -> CoordinatorClient:
    """Return a client of the coordinators at these addresses, with commas between; UserError if one is not usable."""
    token = None if token_file is None else read_secret(Path(token_file), "coordinator token file")
    return CoordinatorClient(addresses, token)


def default_device_name() -> str:
    """Return a unique name: host, process, and a few letters, because one process may run several engines."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_MOST_HOST_LETTERS].strip("._-")
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(2)}"


class PeerWatch:
    """A thread that frees borrowed memory at its deadline, whatever the step loop is doing: the last resort.

    ``hurry`` frees what is due; it returns the seconds until the next deadline, None if nothing is recalled. ``close``
    the watch before what ``hurry`` frees.
    """

    def __init__(self, hurry: Callable[[], float | None]) -> None:
        self._hurry = hurry
        self._has_news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Call ``hurry`` soon, because deadlines may have changed. Callable on any thread."""
        self._has_news.set()

    def close(self) -> None:
        """Stop. Safe to call twice."""
        self._is_closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closing:
            left_s = self._hurry()
            self._has_news.wait(left_s if left_s is None else max(left_s, 0.0))
            self._has_news.clear()
