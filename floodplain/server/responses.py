"""What the server answers, as the OpenAI API shapes it.

Source: https://platform.openai.com/docs/api-reference/{completions,chat,models}
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReasonName = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Where the prompt's KV came from."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request; with several prompts, of all of them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Four lists of one length; ``text_offset`` counts characters of the text. A prompt's first token has no values."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    """A token that stands, or might stand, in the prompt, as vLLM describes it."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[int, PromptToken] | None]
"""For each token of a prompt: itself and the likeliest ones, by id; None for the first."""


class CompletionChoice(BaseModel):
    """The completion of one prompt; the token ids are there if they were asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptTokens | None = None


class Completion(BaseModel):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A token that might have stood here; ``bytes`` is None where a token's bytes depend on its neighbours."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """The token that stands here."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class MadeFunction(BaseModel):
    """A function that the model calls, with its arguments as JSON."""

    name: str
    arguments: str


class MadeCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: MadeFunction


class AssistantMessage(BaseModel):
    """The model's turn; ``content`` is None if it has only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MadeCall] | None = None


class ChatChoice(BaseModel):
    """The only answer to a conversation; the token ids are there if they were asked for."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptTokens | None = None


class ModelCard(BaseModel):
    """A model that is served; ``max_model_len`` is vLLM's addition."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "floodplain"
    max_model_len: int


class ModelList(BaseModel):
    """The answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """The answer of ``/health`` while the server takes requests."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The answer of ``/version``."""

    version: str
