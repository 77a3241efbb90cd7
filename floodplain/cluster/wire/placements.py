"""The message by which the router places a request on an instance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from floodplain.core.ranges import MAX_COUNT, Range
from floodplain.core.request import Goals, Request
from floodplain.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute or resume a request. Its prompt and known tokens are beside the message.

    Attributes:
        ticket: Names the placement.
        request_id: The client's name for it.
        params: Without stop strings: the router checks them in the text.
        age_s: Seconds since it arrived at the router; clocks of machines differ.
        priority: As in ``core.request``, like the remaining fields.
    """

    epoch: int
    ticket: int
    request_id: str
    num_prompt: int
    params: SamplingParams
    age_s: float
    priority: Annotated[int, Range(-(2**63), MAX_COUNT)]
    client: str
    cache_salt: str
    session: str
    goals: Goals
    is_accepted: bool
    choice_group: Annotated[int, Range(0, MAX_COUNT)]


_SHARED = ("request_id", "priority", "client", "cache_salt", "session", "goals", "is_accepted", "choice_group")
"""Fields that a request and its placement have alike."""


def submit_of(request: Request, epoch: int, ticket: int, now: float) -> Submit:
    """The message that places a request; its tokens lie beside the message. ``now``: on the clock of ``arrival_s``."""
    shared = {name: getattr(request, name) for name in _SHARED}
    params, age_s = replace(request.params, stop=()), max(0.0, now - request.arrival_s)
    return Submit(epoch, ticket, num_prompt=len(request.prompt_token_ids), params=params, age_s=age_s, **shared)


def request_of(message: Submit, token_ids: tuple[int, ...], now: float) -> Request:
    """The request of a placement, as the instance submits it to its engine."""
    return Request(
        prompt_token_ids=token_ids[: message.num_prompt],
        known_token_ids=token_ids[message.num_prompt :],
        params=message.params,
        arrival_s=now - message.age_s,
        **{name: getattr(message, name) for name in _SHARED},
    )
