"""What an engine has to do with its neighbours: the agent that speaks for it, and what it lends."""

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
from floodplain.lending.peer_tier import LOOK_S, PeerTier
from floodplain.lending.peer_watch import PeerWatch
from floodplain.lending.pool_lender import PoolLender
from floodplain.web.bearer import read_secret

MOST_RECALL_TIMES = 1000
"""Of the last recalls; whoever counts them looks more often than that many take."""
_MOST_HOST_LETTERS = 40


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """What is seen of an engine's leases.

    Attributes:
        num_bytes: By (``producer`` or ``consumer``, the other end) of leases that have not ended.
        num_recalls: Recalls that have ended.
        recall_times_s: How long the last of them took, at most ``MOST_RECALL_TIMES``.
        num_failed_growths: How often bytes that ought to be free were not, when the pool wanted them back.
        num_borrowed: Leases of a consumer by what became of them, since the start: ``granted`` and made slots,
            ``refused`` for want of memory; of the granted, ``returned`` empty, or ``forced`` out of its hands at the
            deadline.
        failed_exchanges: Exchanges with the coordinator that failed, by problem (``LeaseAgent.failures``).
    """

    num_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    num_recalls: int = 0
    recall_times_s: tuple[float, ...] = ()
    num_failed_growths: int = 0
    num_borrowed: Mapping[str, int] = field(default_factory=dict)
    failed_exchanges: Mapping[str, int] = field(default_factory=dict)


class Neighbours:
    """See the module. ``close`` it when the engine's memory is given back.

    Args:
        agent: Not yet started.
        lent_pool: What the engine lends of; None lends nothing.
        lender: Who lends of it.
        peer_tier: What the engine borrows for swapping; None borrows nothing for that.
        near_layers: What it borrows for layers that stream; None borrows nothing for these.
        hurry: Called in the place of the tier's own, on a thread of its own, whenever there is news of leases.

    Attributes:
        on_news: Called on the agent's thread whenever there is: a boundary should come soon.
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
        self.agent = agent
        self.lent_pool = lent_pool
        self.lender = lender
        self.peer_tier = peer_tier
        self.near_layers = near_layers
        self._borrowers = [one for one in (peer_tier, near_layers) if one is not None]
        self._watch = PeerWatch(hurry or self._hurry) if self._borrowers else None
        self._recall_times_s: deque[float] = deque(maxlen=MOST_RECALL_TIMES)
        self._num_recalls = 0
        self._mutex = threading.Lock()
        self._has_news = False  # set before ``on_news`` is called, so that the boundary that it brings finds it
        self.on_news: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Join, and go on in the background; without a coordinator it warns once and goes on trying.

        Raises:
            UserError: The coordinator refuses: the token is wrong, or the name.
        """
        self.agent.membership.on_news = self._note_news
        if self._watch is not None:
            self._watch.start()
        self.agent.start()

    def retire(self) -> None:
        """Free what is borrowed and look after what was lent, before the engine's memory goes. Safe to call twice."""
        if self._watch is not None:
            self._watch.close()
        for borrower in self._borrowers:
            borrower.close()
        self.agent.retire()

    def close(self) -> None:
        """Say goodbye, when the engine has given back its memory. Safe to call twice."""
        self.retire()
        self.agent.close()

    @property
    def rest_s(self) -> float:
        """So long the next boundary may wait, where no step brings one: not at all while each of them moves memory."""
        if self.lender is not None and self.lender.is_moving:
            return 0.0
        return LOOK_S if self.peer_tier is not None and self.peer_tier.is_leaving else float("inf")

    def at_boundary(self, now: float) -> None:
        """No step is outstanding: whatever must be done to memory is done now. Seldom takes more than a microsecond."""
        if self.lender is not None:
            self.lender.at_boundary(now)
        has_news, self._has_news = self._has_news, False
        for borrower in self._borrowers:
            if has_news:
                borrower.look()
            borrower.at_boundary(now)

    def facts(self) -> LeaseFacts:
        """What is seen of leases now; may be asked on any thread."""
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
    """For the coordinators at these addresses, with commas between. Nothing is sent yet.

    Raises:
        UserError: An address or the token's file is not usable.
    """
    token = None if token_file is None else read_secret(Path(token_file), "coordinator token file")
    return CoordinatorClient(addresses, token)


def default_device_name() -> str:
    """A name that no other engine has: host, process, and a few letters, since one process may run several."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_MOST_HOST_LETTERS].strip("._-")
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(2)}"
