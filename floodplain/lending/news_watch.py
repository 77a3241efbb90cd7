"""The thread of an agent that long-polls for news of its leases, so that recalls are known at once.

News is a hint: the agent then exchanges, as it does with every beat. If there is no news to get, for example from an
older coordinator, everything arrives with the next beat.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from floodplain.core.errors import UserError
from floodplain.lending.client import CoordinatorClient, CoordinatorUnreachable

logger = logging.getLogger(__name__)

WAIT_S = 20.0
"""The longest wait of one request."""
GAP_S = 0.02
"""Between two requests, however much news there is."""
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""The first pause after a failed request, which doubles with each failure, and the longest."""
CLOSING_S = 1.0
"""The most that an ending agent waits for the thread."""


class NewsWatch:
    """Long-polls for news of a member's leases. It starts when first wanted, and ``close`` ends it.

    Args:
        client: Its own from now on.
        name: Of the member.
        on_news: Called on the thread when the agent should exchange.
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
