"""The requests, answer chunks and records of a load."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a workload.

    Attributes:
        arrival_s: When to send it, in seconds since the load began.
        prompt: Its text; None if it exists only as tokens.
        prompt_token_ids: Its tokens, at least one; targets send these if possible, so that lengths are exact.
        ignore_eos: Whether to continue past the end of sequence, so that the output is ``max_tokens`` long.
    """

    request_id: str
    arrival_s: float
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """A server's own counts of a finished request; None for unknown counts."""

    prompt_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One piece of an answer.

    Attributes:
        received_s: When it arrived, by ``time.monotonic``.
        text: May be empty (a token that is no complete character, or the last chunk).
        token_ids: Its tokens; None if the target does not send them: then ``usage`` has their total number.
        usage: The counts of the whole request, on at most one chunk, which has no token itself.
    """

    received_s: float
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    usage: TokenUsage | None = None


class RequestFailed(Exception):
    """A target could not answer a request completely. The message is one line for the record."""


class LoadTarget(Protocol):
    """A target of a load: a server, or an engine in this process."""

    def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer to ``request`` as it arrives; closing aborts it. Raises RequestFailed if it is not whole."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A client's record of one request. Times are seconds since the load began, on a monotonic clock.

    Attributes:
        prompt_tokens: The target's count if it sends one, else the number sent.
        arrival_s: The arrival time in the workload.
        sent_s: When it was sent; latencies count from here.
        token_times_s: When each output token arrived; tokens of one chunk have the same time.
        output_token_ids: The tokens; None if the target does not send them.
        error: Why it failed, in one line; None if the answer is complete.
    """

    request_id: str
    prompt_tokens: int
    arrival_s: float
    sent_s: float
    finished_s: float
    token_times_s: tuple[float, ...]
    output_token_ids: tuple[int, ...] | None
    text: str
    error: str | None = None
