"""What is sent, what comes back, and what is remembered of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a workload.

    Attributes:
        request_id: Unique in the workload.
        arrival_s: When to send it, in seconds since the load began.
        prompt: Its text, or None where it exists only as tokens.
        prompt_token_ids: Its tokens, at least one; targets that can take tokens send these, so that lengths are exact.
        max_tokens: Most tokens to generate.
        ignore_eos: Go on past the end of sequence, so that the output is ``max_tokens`` long.
    """

    request_id: str
    arrival_s: float
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """A server's own count of a finished request; None for what it does not tell."""

    prompt_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One piece of an answer.

    Attributes:
        received_s: When it came, by ``time.monotonic``.
        text: Its text; may be empty (a token that is no whole character, or the last chunk).
        token_ids: Its tokens, or None when the target does not tell: ``usage`` then says how many came in all.
        usage: The count of the whole request, on at most one chunk, which itself holds no token.
    """

    received_s: float
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    usage: TokenUsage | None = None


class RequestFailed(Exception):
    """A target could not answer a request wholly. The message is one line for the record."""


class LoadTarget(Protocol):
    """Something that answers requests: a server, or an engine in this process."""

    def send(self, request: LoadRequest) -> AsyncGenerator[TokenChunk, None]:
        """Send ``request`` now and yield its answer as it comes; ends normally only if the answer is complete.

        Closing the generator early (or cancelling its task) aborts the request at the target.

        Raises:
            RequestFailed: No answer, or an incomplete one.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What a client saw of one request. Times are seconds since the load began, on a monotonic clock.

    Attributes:
        request_id: That of the request.
        prompt_tokens: As counted by the target if it tells, else as sent.
        arrival_s: When the workload wanted it sent.
        sent_s: When it was sent; latencies count from here.
        finished_s: When its answer ended or failed.
        token_times_s: When each output token came; tokens of one chunk came together.
        output_token_ids: The tokens, or None when the target does not tell.
        text: The answer's text.
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
