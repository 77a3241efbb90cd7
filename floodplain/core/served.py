"""Served work as explicit state: what fairness between requests, or between keys, is counted by.

Work is counted in tokens, divided by the weight of the request's priority. Between requests only those count that were
generated: a prompt is the price of entry, and charging it to the stream that follows would only silence that stream.
Between keys each token of a prompt counts ``PROMPT_WEIGHT`` beside them.

Whoever arrives, or comes back from idle, begins at the least that any active one has been served (VTC's lift,
https://arxiv.org/abs/2401.00588; Linux's ``min_vruntime``): being away saves nothing up, and a stream of newcomers
cannot claim all that those before them were given.
"""

from __future__ import annotations

from collections.abc import Iterable

PROMPT_WEIGHT = 0.5
"""A prompt's tokens are computed many at a time: VTC counts them half."""

WEIGHT_PER_PRIORITY = 1.25
"""One step of priority is a quarter more or less of the device, as one step of ``nice`` is in Linux."""

MAX_PRIORITY = 20
"""Priorities beyond it, either way, weigh no more and no less: a factor of 87, as ``nice`` has."""


def weight_of(priority: int) -> float:
    """The share that a priority stands for, relative to priority 0; lower numbers weigh more."""
    bounded = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
    return float(WEIGHT_PER_PRIORITY**-bounded)


def weighted_work(num_prompt: int, num_generated: int, priority: int) -> float:
    """Work of a sequence whose first ``num_prompt`` prompt tokens are computed."""
    return (PROMPT_WEIGHT * num_prompt + num_generated) / weight_of(priority)


class KeyAccounts:
    """What the requests of each API key have been served, those that ended included; and the keys' places in line.

    ``credits`` is a mapping from the keys that have live requests to the work that does not stand in those: lift, and
    what has ended. It is replaced, never changed.
    """

    def __init__(self) -> None:
        self.credits: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        self._idle: dict[str, float] = {}
        self._next_place: dict[str, float] = {}
        self._last_begun = 0.0

    def arrive(self, client: str, live_work: Iterable[tuple[str, float]]) -> None:
        """A request of ``client`` arrives; ``live_work`` has (key, work) of those before it.

        Of the waiting, the first in line are enough: those behind them have been given nothing yet, or little.
        """
        self._num_live[client] = self._num_live.get(client, 0) + 1
        if client in self.credits:
            return
        totals = dict(self.credits)
        for key, work in live_work:
            totals[key] += work
        credit = max(self._idle.pop(client, 0.0), min(totals.values(), default=0.0))
        self.credits = self.credits | {client: credit}

    def depart(self, client: str, work: float) -> None:
        """A request of ``client`` ended that had been given ``work``."""
        self._num_live[client] -= 1
        total = self.credits[client] + work
        if self._num_live[client]:
            self.credits = self.credits | {client: total}
            return
        del self._num_live[client]
        self.credits = {key: credit for key, credit in self.credits.items() if key != client}
        if self.credits:
            self._idle[client] = total
        else:  # nobody is active: whoever comes next begins a new account
            self._idle.clear()
            self._next_place.clear()
            self._last_begun = 0.0

    def take_place(self, client: str, priority: int) -> float:
        """Where a new request of ``client`` stands in a line in which keys take turns, however many each has there.

        Start-time fair queueing (https://doi.org/10.1145/248156.248171): one request behind the key's last, or a part
        of one by its weight, but not before who has begun already.
        """
        place = max(self._last_begun, self._next_place.get(client, 0.0))
        self._next_place[client] = place + 1 / weight_of(priority)
        return place

    def leave_line(self, place: float) -> None:
        """Who had this place has begun."""
        self._last_begun = max(self._last_begun, place)
