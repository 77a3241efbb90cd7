"""What a client may send: the bodies of the OpenAI API, with the fields that vLLM adds.

Every field is either served or refused by name. A field of the API that is not served is accepted at the value that
means "off", so that clients which spell out the defaults work. Ranges are checked by ``SamplingParams``.

Source: https://platform.openai.com/docs/api-reference/{completions,chat}/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from floodplain.core.errors import UserError
from floodplain.core.sampling import SamplingParams

MAX_PROMPTS = 256
"""Most prompts in one completion request."""

COMPLETION_MAX_TOKENS = 16
"""``max_tokens`` of a completion request that gives none, as in the OpenAI API."""

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

One = Annotated[int, Field(ge=1, le=1)]
OneReal = Annotated[float, Field(ge=1, le=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
NoItems = Annotated[list[Any], Field(max_length=0)]
NoEntries = Annotated[dict[str, Any], Field(max_length=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SharedUnsupported(_Body):
    n: One | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: OneReal | None = None
    min_p: Zero | None = None
    logit_bias: NoEntries | None = None


class _CompletionUnsupported(_Body):
    best_of: One | None = None
    echo: Literal[False] | None = None
    suffix: None = None


class TextFormat(_Body):
    """The only ``response_format`` that is served."""

    type: Literal["text"]


class _ChatUnsupported(_Body):
    audio: None = None
    function_call: Literal["none"] | None = None
    functions: NoItems | None = None
    metadata: NoEntries | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    reasoning_effort: Literal["none"] | None = None
    response_format: TextFormat | None = None
    safety_identifier: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: Literal["none"] | None = None
    tools: NoItems | None = None
    verbosity: None = None
    web_search_options: None = None


UNSUPPORTED_FIELDS = frozenset(
    {*_SharedUnsupported.model_fields, *_CompletionUnsupported.model_fields, *_ChatUnsupported.model_fields}
)
"""Fields that are known and accepted only at the value that means "off"."""


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationRequest(_SharedUnsupported):
    """The fields that both endpoints share. ``user`` is accepted and not looked at.

    ``tpot_goal_ms`` is ours: the milliseconds per token that are quick enough for whoever reads.
    """

    model: str
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    tpot_goal_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    user: str | None = None

    @property
    def pace(self) -> float | None:
        """Tokens per second that meet the goal for TPOT, if there is one."""
        return None if self.tpot_goal_ms is None else 1e3 / self.tpot_goal_ms

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the usage.

        Raises:
            UserError: ``stream_options`` without ``stream``.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise UserError("stream_options needs stream to be true")
        return bool(self.stream_options.include_usage)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = {
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **chosen)


class CompletionRequest(GenerationRequest, _CompletionUnsupported):
    """The body of ``/v1/completions``: one prompt or several, as text or as tokens."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Int | None = None

    def sampling(self) -> SamplingParams:
        """How to sample.

        Raises:
            UserError: A value is out of its range.
        """
        return self._sampling(COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if isinstance(item, str)]
        token_lists = [item for item in self.prompt if isinstance(item, list)]
        return [*texts, *token_lists] or [[item for item in self.prompt if isinstance(item, int)]]


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: NoItems | None = None
    annotations: NoItems | None = None

    def templated(self) -> dict[str, str]:
        """The message as chat templates know it: ``developer`` is today's name of ``system``."""
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


class ChatRequest(GenerationRequest, _ChatUnsupported):
    """The body of ``/v1/chat/completions``. Without ``max_tokens`` the answer may be as long as the model allows."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    def sampling(self) -> SamplingParams:
        """How to sample.

        Raises:
            UserError: A value is out of its range, or two fields contradict each other.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs needs logprobs to be true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise UserError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self._sampling(limits.pop() if limits else None, (self.top_logprobs or 0) if self.logprobs else None)
