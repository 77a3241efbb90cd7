"""The router's live requests: places each on an instance, and passes its results to its caller.

Tokens become text here, so the text survives the end of an instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from floodplain.cluster.state.request_table import MAX_FAILED_PLACEMENTS, Entry, RequestTable
from floodplain.cluster.state.row_checks import check_token
from floodplain.cluster.wire.messages import Abort, Accepted, Refused, RouterMessage, TokenRow, Tokens, error_of
from floodplain.cluster.wire.placements import submit_of
from floodplain.core.errors import RequestGivenUp
from floodplain.core.lifecycle import EndedRequest, EventKind, Lifecycle
from floodplain.core.ranges import MAX_TOKEN_ID
from floodplain.core.request import FinishReason, Request
from floodplain.engine.outputs import OutputDelta
from floodplain.engine.text_stream import TextStream
from floodplain.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Caller:
    """The text and the stream of one request. Everything is called on the event loop.

    ``deltas`` has what the client has not read; an exception ends it. ``finish_reason`` is None until the last token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        on_accepted: Callable[[], None] = lambda: None,
        on_first_token: Callable[[Lifecycle], None] = lambda _: None,
    ) -> None:
        self.deltas: asyncio.Queue[OutputDelta | BaseException] = asyncio.Queue()
        self.lifecycle = Lifecycle(request.arrival_s)
        self.finish_reason: FinishReason | None = None
        self._on_accepted, self._on_first_token = on_accepted, on_first_token
        self._text = TextStream(tokenizer, request, self.lifecycle)

    def take(self, token: int, row: TokenRow, now: float) -> FinishReason | None:
        """Add the next token, from this row. Why the request ends with it; None if it does not."""
        self.lifecycle.token_times_s.append(now)
        is_first = len(self.lifecycle.token_times_s) == 1
        if is_first:
            self.lifecycle.num_cached_tokens = row.num_cached_tokens
            self._on_first_token(self.lifecycle)
        reason = None if row.finish_reason is None else FinishReason(row.finish_reason)
        delta = self._text.take(token, reason, row.logprobs, row.prompt_logprobs if is_first else None)
        if delta.finish_reason is not None:
            self.finish_reason = FinishReason(delta.finish_reason)
            self.lifecycle.record(EventKind.FINISHED, now)
        self.deltas.put_nowait(delta)
        return self.finish_reason

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


Send = Callable[[int, RouterMessage, tuple[int, ...]], None]
"""Sends a message and token ids to the instance of an epoch; does nothing if its session has ended."""


class Requests:
    """The live requests of a router.

    Attributes:
        on_opened: Called with each request that arrives; ``on_closed``: with each that ended, for any reason.
        num_moved: How often a request was placed again after it had lost its instance.
        num_moved_tokens: Tokens that are recomputed for that, prompts included.
        num_prompt_tokens: Prompt tokens of all requests that got a token, each once.
    """

    def __init__(
        self,
        table: RequestTable,
        send: Send,
        on_finished: Callable[[EndedRequest], None],
        vocab_size: int = MAX_TOKEN_ID + 1,
    ) -> None:
        self.on_opened: Callable[[Entry], None] = lambda _: None
        self.on_closed: Callable[[Entry], None] = lambda _: None
        self.num_moved = self.num_moved_tokens = self.num_prompt_tokens = self.num_generated_tokens = 0
        self._table, self._send, self._on_finished = table, send, on_finished
        self._vocab_size = vocab_size
        self._callers: dict[int, Caller] = {}

    def submit(self, request: Request, caller: Caller) -> Entry:
        """Add a request, and place it if possible; its caller gets its results."""
        entry = self._table.open(request)
        self._callers[entry.number] = caller
        self.on_opened(entry)
        self.place()
        return entry

    def caller_of(self, entry: Entry) -> Caller:
        """The caller of a live request."""
        return self._callers[entry.number]

    def drop(self, entry: Entry) -> None:
        """End a request that its caller no longer reads: its instance aborts it. Safe to call twice."""
        where = self._close(entry)
        if where is not None:
            self._send(where[0], Abort(*where), ())
        if entry.is_suspect:
            self.place()  # another suspect may have waited for its place

    def _close(self, entry: Entry) -> tuple[int, int] | None:
        """End a request, as ``RequestTable.close``. Safe to call twice."""
        self._callers.pop(entry.number, None)
        self.on_closed(entry)
        return self._table.close(entry)

    def place(self) -> None:
        """Place waiting requests on instances as far as possible, and send them there."""
        now = time.monotonic()
        for entry in self._table.place():
            assert entry.epoch is not None and entry.ticket is not None
            request = entry.as_request()
            if entry.num_moves:
                self.num_moved += 1
                self.num_moved_tokens += entry.num_tokens
            message = submit_of(request, entry.epoch, entry.ticket, now)
            self._send(entry.epoch, message, request.prompt_token_ids + request.known_token_ids)

    def give_back(self, entry: Entry) -> None:
        """Take a request off its instance, which cannot continue it: it waits for another, or fails."""
        if not self._table.give_back(entry):
            words = "%d instances in a row ended under a request of %d tokens: it is given up"
            logger.warning(words, MAX_FAILED_PLACEMENTS, entry.num_tokens)
            why = f"{MAX_FAILED_PLACEMENTS} instances in a row ended under this request: it is given up"
            self._callers[entry.number].fail(RequestGivenUp(why))
            self._close(entry)

    # -- messages of instances -----------------------------------------------------------------------------------------

    def take_tokens(self, message: Tokens) -> None:
        """Apply an instance's new tokens. ``WireError`` for another instance's request or a wrong token."""
        now = time.monotonic()
        for row in message.rows:
            self._table.check_ticket(message.epoch, row.ticket)
            entry = self._table.find(message.epoch, row.ticket)
            if entry is None:
                continue
            if row.token is None:  # the instance ended it without a token
                self.give_back(entry)
                self.place()
                continue
            max_model_len = self._table.roster.expect(message.epoch).facts.max_model_len
            check_token(entry, row, max_model_len, self._vocab_size)
            if not entry.tokens:
                self.num_prompt_tokens += len(entry.request.prompt_token_ids)
            self.num_generated_tokens += 1
            was_suspect = entry.is_suspect
            self._table.take(entry, row.token)
            caller = self._callers[entry.number]
            reason = caller.take(row.token, row, now)
            if reason is not None:
                self._finish(entry, caller, reason, is_known=row.finish_reason is not None)
            if was_suspect:
                self.place()  # another suspect may have waited for its place

    def take_acceptance(self, message: Accepted) -> None:
        """An instance has accepted a request. Raises ``WireError`` if it was never placed there."""
        self._table.check_ticket(message.epoch, message.ticket)
        entry = self._table.find(message.epoch, message.ticket)
        if entry is not None:
            self._callers[entry.number].accept()

    def take_refusal(self, message: Refused) -> None:
        """An instance refuses a request: place it elsewhere, or fail it. ``WireError`` if it never had it."""
        self._table.check_ticket(message.epoch, message.ticket)
        entry = self._table.find(message.epoch, message.ticket)
        if entry is None:
            return
        is_local = message.why == "full" or entry.num_moves > 0
        if message.why == "stopping":
            self.give_back(entry)
        elif not (is_local and self._table.refuse(entry)):
            self._callers[entry.number].fail(error_of(message))
            self._close(entry)
        self.place()

    def _finish(self, entry: Entry, caller: Caller, reason: FinishReason, *, is_known: bool) -> None:
        if is_known:
            self._close(entry)
        else:  # a stop string: the instance does not know of it
            self.drop(entry)
        self._on_finished(EndedRequest(entry.request, caller.lifecycle, reason))
