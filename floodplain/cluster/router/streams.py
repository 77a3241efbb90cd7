"""One caller of the router. Tokens become text here, so the text survives the end of an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from floodplain.cluster.wire.messages import TokenRow
from floodplain.core.lifecycle import EventKind, Lifecycle
from floodplain.core.request import FinishReason, Request
from floodplain.engine.outputs import OutputDelta
from floodplain.model.tokenizer import StreamDecoder, Tokenizer


class Caller:
    """The text and the stream of one request. Everything is called on the event loop.

    Args:
        tokenizer: The model's tokenizer.
        request: The request as it arrived.
        on_accepted: Called once an instance has accepted it.

    Attributes:
        deltas: Deltas that the client has not read, or the exception that ends the stream.
        lifecycle: Times measured at the router.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, on_accepted: Callable[[], None] = lambda: None) -> None:
        params = request.params
        self.deltas: asyncio.Queue[OutputDelta | BaseException] = asyncio.Queue()
        self.lifecycle = Lifecycle(request.arrival_s)
        self._on_accepted = on_accepted
        self._wants_logprobs = params.logprobs is not None
        self._decoder = StreamDecoder(
            tokenizer,
            request.prompt_token_ids,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def take(self, token: int, row: TokenRow, now: float) -> FinishReason | None:
        """Add the next token. Why the request ends with it; None if it does not.

        Args:
            token: The token.
            row: The row that brought it.
            now: On the clock of the request's arrival.
        """
        if not self.lifecycle.token_times_s:
            self.lifecycle.num_cached_tokens = row.num_cached_tokens
        self.lifecycle.token_times_s.append(now)
        reason = None if row.finish_reason is None else FinishReason(row.finish_reason)
        text = self._decoder.flush() if reason is FinishReason.STOP else self._decoder.push(token)
        if reason is FinishReason.LENGTH and not self._decoder.is_stopped:
            text += self._decoder.flush()
        if self._decoder.is_stopped:
            reason = FinishReason.STOP
        if reason is not None:
            self.lifecycle.record(EventKind.FINISHED, now)
        logprobs = (row.logprobs,) if self._wants_logprobs and row.logprobs is not None else None
        self.deltas.put_nowait(
            OutputDelta(
                text=text,
                token_ids=(token,),
                finish_reason=None if reason is None else reason.value,
                logprobs=logprobs,
                num_cached_tokens=self.lifecycle.num_cached_tokens,
            )
        )
        return reason

    def accept(self) -> None:
        """An instance has accepted the request; only the first call counts."""
        on_accepted, self._on_accepted = self._on_accepted, lambda: None
        on_accepted()

    def fail(self, error: BaseException) -> None:
        """End the request with an exception."""
        self.deltas.put_nowait(error)

    def abort(self) -> None:
        """End the request because the server stops."""
        self.deltas.put_nowait(OutputDelta("", (), FinishReason.ABORT.value))
