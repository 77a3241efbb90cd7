"""Turns sampled tokens into text: detokenises, finds stop strings, and makes the deltas for clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepOutputs, TokenLogprobs
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.engine.outputs import OutputDelta
from floodplain.model.tokenizer import StreamDecoder, Tokenizer


@dataclass(slots=True)
class _Stream:
    decoder: StreamDecoder
    wants_logprobs: bool
    lifecycle: Lifecycle


class OutputProcessor:
    """Owner of the text state of every live request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[SeqId, _Stream] = {}

    def add(self, seq_id: SeqId, request: Request, lifecycle: Lifecycle) -> None:
        """Add the text state of a new request; ``lifecycle`` is the loop's, and is only read."""
        params = request.params
        decoder = StreamDecoder(
            self._tokenizer,
            request.prompt_token_ids + request.known_token_ids,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens - len(request.known_token_ids),
        )
        self._streams[seq_id] = _Stream(decoder, params.logprobs is not None, lifecycle)

    def drop(self, seq_id: SeqId) -> None:
        """Drop the text state of a request; it gets no more deltas."""
        self._streams.pop(seq_id, None)

    def process(self, outputs: StepOutputs) -> Iterator[tuple[SeqId, OutputDelta]]:
        """One delta for every sequence that got a token.

        A delta whose ``finish_reason`` is ``stop`` although the step did not finish its sequence means that a stop
        string was found: the caller must end the sequence in the loop.
        """
        for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
            stream = self._streams.get(seq_id)
            if stream is not None:
                logprobs = outputs.logprobs.get(seq_id)
                yield seq_id, self._delta(seq_id, stream, token, outputs.finished.get(seq_id), logprobs)

    def _delta(
        self,
        seq_id: SeqId,
        stream: _Stream,
        token: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> OutputDelta:
        is_stop_token = reason is FinishReason.STOP
        text = stream.decoder.flush() if is_stop_token else stream.decoder.push(token)
        if reason is FinishReason.LENGTH and not stream.decoder.is_stopped:
            text += stream.decoder.flush()
        if stream.decoder.is_stopped:
            reason = FinishReason.STOP
        if reason is not None:
            del self._streams[seq_id]
        return OutputDelta(
            text=text,
            token_ids=(token,),
            finish_reason=None if reason is None else reason.value,
            logprobs=(logprobs,) if stream.wants_logprobs and logprobs is not None else None,
            num_cached_tokens=stream.lifecycle.num_cached_tokens,
        )
