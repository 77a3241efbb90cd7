"""The output of one request: its tokens become text, which ends at a stop string."""

from __future__ import annotations

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import PromptLogprobs, TokenLogprobs
from floodplain.core.request import FinishReason, Request
from floodplain.engine.outputs import OutputDelta
from floodplain.model.text_pieces import StreamDecoder
from floodplain.model.tokenizer import Tokenizer


class TextStream:
    """The text state of a live request, which may go on from known tokens. Its ``lifecycle`` is only read."""

    def __init__(self, tokenizer: Tokenizer, request: Request, lifecycle: Lifecycle) -> None:
        params = request.params
        self._lifecycle, self._wants_logprobs = lifecycle, params.logprobs is not None
        self._decoder = StreamDecoder(
            tokenizer,
            request.prompt_token_ids + request.known_token_ids,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens - len(request.known_token_ids),
        )

    def take(
        self,
        token: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> OutputDelta:
        """The delta of the next token. ``reason``: why the step loop ends the request with it; None if it does not.

        A stop string ends the request, too. The step loop does not see it: then the caller ends the request there.
        """
        text = self._decoder.flush() if reason is FinishReason.STOP else self._decoder.push(token)
        if reason is FinishReason.LENGTH:
            text += self._decoder.flush()
        if self._decoder.is_stopped:
            reason = FinishReason.STOP
        return OutputDelta(
            text=text,
            token_ids=(token,),
            finish_reason=None if reason is None else reason.value,
            logprobs=(logprobs,) if self._wants_logprobs and logprobs is not None else None,
            num_cached_tokens=self._lifecycle.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
