"""Served work: the measure of fairness between requests or between API keys.

Work is counted in tokens, divided by the weight of the request's priority. Between requests only generated tokens
count, of all choices of a request together: charging a prompt to the stream that follows would only silence that
stream. Between keys each token of a prompt counts ``PROMPT_WEIGHT`` as well, once for all choices.

A request that arrives, or a key that becomes active again, starts at the least work of any active one (VTC's lift,
https://arxiv.org/abs/2401.00588; Linux's ``min_vruntime``): idle time earns no credit, and a stream of new requests
cannot claim all that earlier ones were served.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from floodplain.core.request import SeqId

PROMPT_WEIGHT = 0.5
"""Weight of a prompt token: VTC counts it half, since many are computed at a time."""

WEIGHT_PER_PRIORITY = 1.25
"""One step of priority is a quarter more or less of the device, as one step of ``nice`` is in Linux."""

MAX_PRIORITY = 20
"""Priorities are clamped to this, either way: a factor of 87, as ``nice`` has."""


def weight_of(priority: int) -> float:
    """Weight of a priority, relative to priority 0; lower priority numbers weigh more."""
    bounded = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
    return float(WEIGHT_PER_PRIORITY**-bounded)


def weighted_work(num_prompt: int, num_generated: int, priority: int) -> float:
    """Work of a sequence whose first ``num_prompt`` prompt tokens are computed."""
    return (PROMPT_WEIGHT * num_prompt + num_generated) / weight_of(priority)


class Choice(Protocol):
    """One of the answers that a request asked for (its ``n``): a sequence of its own."""

    @property
    def num_generated(self) -> int:
        """Its output tokens."""
        ...


_Choice = TypeVar("_Choice", bound=Choice)


class RequestAccount(Generic[_Choice]):
    """Served work of one request. Its choices share the account.

    Attributes:
        parent: Names the request: the id of the choice that opened the account.
        credit: Served work that the request was credited at arrival.
        place: Its place in the line in which keys alternate.
        choices: Those that are live.
        num_ended_tokens: Output tokens of those that have ended.
    """

    __slots__ = ("choices", "credit", "num_ended_tokens", "parent", "place", "priority")

    def __init__(self, parent: SeqId, priority: int, first: _Choice, credit: float = 0.0) -> None:
        self.parent, self.priority, self.credit = parent, priority, credit
        self.place = 0.0
        self.choices = [first]
        self.num_ended_tokens = 0

    @property
    def work(self) -> float:
        """Its credit, and the weighted output tokens of all choices."""
        num_generated = self.num_ended_tokens + sum([one.num_generated for one in self.choices])
        return self.credit + weighted_work(0, num_generated, self.priority)

    def remove(self, choice: _Choice) -> None:
        """Remove a choice that has ended; its output still counts."""
        self.choices.remove(choice)
        self.num_ended_tokens += choice.num_generated


class KeyAccounts:
    """Served work of each API key, ended requests included, and the keys' places in line.

    ``credits``: each key with live requests, its lift and the work of its ended requests; replaced, not changed.
    """

    def __init__(self) -> None:
        self.credits: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        self._idle: dict[str, float] = {}
        self._next_place: dict[str, float] = {}
        self._last_begun = 0.0

    def arrive(self, client: str, live_work: Iterable[tuple[str, float]]) -> None:
        """Add a request of ``client``; ``live_work`` has (key, work) of earlier live requests.

        Of waiting requests, the first in line are enough: those behind them have been served nothing yet, or little.
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
        """Remove an ended request of ``client``, which was served ``work``."""
        self._num_live[client] -= 1
        total = self.credits[client] + work
        if self._num_live[client]:
            self.credits = self.credits | {client: total}
            return
        del self._num_live[client]
        self.credits = {key: credit for key, credit in self.credits.items() if key != client}
        if self.credits:
            self._idle[client] = total
        else:  # no key is active: the next request begins a new account
            self._idle.clear()
            self._next_place.clear()
            self._last_begun = 0.0

    def take_place(self, client: str, priority: int) -> float:
        """The place of a new request in a line in which keys alternate, however many requests each key has.

        Start-time fair queueing (https://doi.org/10.1145/248156.248171): one place, divided by the request's weight,
        behind the key's last request, but not before a request that has begun already.
        """
        place = max(self._last_begun, self._next_place.get(client, 0.0))
        self._next_place[client] = place + 1 / weight_of(priority)
        return place

    def leave_line(self, place: float) -> None:
        """Note that the request with this place has begun."""
        self._last_begun = max(self._last_begun, place)
