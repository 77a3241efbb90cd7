"""What a client may send: the bodies of the OpenAI API, with the fields that vLLM adds.

Every field is served, ignored because it cannot change tokens, or refused by name (``fields``). ``SamplingParams``
checks ranges. Source: https://platform.openai.com/docs/api-reference/{completions,chat}/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo

from floodplain.core.errors import RequestRefused, UserError
from floodplain.core.request import Goals
from floodplain.core.sampling import ANY_OBJECT, MAX_LOGPROBS, SamplingParams, Structure, StructureKind
from floodplain.model.structure import structure_of_choices, structure_of_schema
from floodplain.server.fields import IGNORED, OFF, Body, Off, at_null, chosen_by
from floodplain.server.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice, call_structure, check_choice
from floodplain.web.errors import BRANCH
from floodplain.web.gate import REQUEST_ID


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Refuses prompts that leave no room for output in ``max_model_len`` tokens."""

    max_model_len: int

    def check(self, num_tokens: int, what: str) -> None:
        """Raise RequestRefused if a prompt of at least ``num_tokens`` tokens, described by ``what``, cannot fit."""
        if num_tokens >= self.max_model_len:
            limit = f"the {self.max_model_len} tokens of max_model_len"
            raise RequestRefused(f"{what} and the output are more than {limit}: send a shorter prompt")


MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Bounded, because each new token's text is compared with all stop strings, on the engine's thread."""
MAX_BIASES, MAX_ALLOWED, MAX_BAD_WORDS, MAX_BAD_CHARS = 1024, 4096, 64, 256
"""Bounded, because each costs time in every step of all requests."""

TEXT, TEXTS, TOKENS, TOKEN_LISTS = (f"{BRANCH} {name}" for name in ("text", "texts", "tokens", "token lists"))

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
"""A token id as a key of a JSON object."""

_BadWord = Annotated[str, Field(max_length=MAX_BAD_CHARS)]

RequestId = Annotated[str, Field(pattern=REQUEST_ID)]
SessionName = Annotated[str, Field(max_length=1024)]


def kind_of_text(value: object) -> str | None:
    """The branch of a text or a list of texts; None for other values."""
    return TEXT if isinstance(value, str) else TEXTS if isinstance(value, list) else None


def _kind_of_prompt(value: object) -> str | None:
    """The branch of a prompt. A list's branch is decided by its first item."""
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else None
    first = value[0] if value else ""
    return TOKENS if isinstance(first, int | float) else TOKEN_LISTS if isinstance(first, list) else TEXTS


_StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopText, Tag(TEXT)] | Annotated[list[_StopText], Field(max_length=MAX_STOPS), Tag(TEXTS)],
    chosen_by(kind_of_text, "should be a string or a list of strings"),
]


def _check_fits(value: object, info: ValidationInfo) -> object:
    """Refuse too many tokens by their number, before any token is validated."""
    if isinstance(value, list) and isinstance(info.context, PromptLimit):
        info.context.check(len(value), f"{len(value)} prompt tokens")
    return value


Tokens = Annotated[list[TokenId], Field(min_length=1), BeforeValidator(_check_fits)]
Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[Tokens, Tag(TOKENS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TOKEN_LISTS)],
    chosen_by(_kind_of_prompt, "should be a string, a list of strings, a list of token ids, or a list of such lists"),
]


BY_PARTS = chosen_by(kind_of_text, "should be a string or a list of text parts")


class TextPart(Body):
    """A piece of a message."""

    ignores: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    ignores_others: ClassVar[bool] = True

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(min_length=1), Tag(TEXTS)],
    BY_PARTS,
]


class Message(Body):
    """One turn of a conversation."""

    off: ClassVar[Off] = {
        **at_null("audio", "function_call", "refusal"),
        "annotations": ([],),
        "partial": (False,),
        "prefix": (False,),
    }
    ignores: ClassVar[frozenset[str]] = frozenset({"name"})
    ignores_others: ClassVar[bool] = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def ignored_fields(self) -> set[str]:
        """The fields of the message and its parts that were given and ignored."""
        parts = self.content if isinstance(self.content, list) else ()
        return {f"messages.{name}" for part in (self, *parts) for name in part.ignored}

    def templated(self, place: str) -> dict[str, Any]:
        """The message at a place of the body in the form of chat templates: ``developer`` is ``system``'s newer name.

        Raises UserError if it lacks its content, or has fields of another role.
        """
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise UserError(f"{place}.content is required for the role {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise UserError(f"{place}.tool_calls: only an assistant makes calls, not the role {self.role}")
        parts = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        fields: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": parts}
        if self.tool_calls:
            fields["tool_calls"] = [call.templated() for call in self.tool_calls]
        more = {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content or self.reasoning}
        return fields | {name: value for name, value in more.items() if value}


def templated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates. Raises UserError, with its place, for one that has none."""
    return [message.templated(f"messages.{index}") for index, message in enumerate(messages)]


COMPLETION_MAX_TOKENS = 16
"""``max_tokens`` of a completion request that gives none, as in the OpenAI API."""


class UsageDetail(Enum):
    """Which events of a stream carry a usage."""

    NONE = "none"
    LAST = "last"
    EACH = "each"


class StreamOptions(Body):
    """What a stream carries beside the text.

    With ``include_usage``, ``continuous_usage_stats`` puts the usage so far on every event.
    """

    off: ClassVar[Off] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseSchema(Body):
    """The JSON schema of an answer. It is always followed strictly."""

    ignores: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """What the text of an answer is: any text, any JSON object, or an object of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseSchema | None = None

    @property
    def structure(self) -> Structure | None:
        """The structure; None for any text. Raises UserError if the schema is missing, or there is one too many."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UserError('response_format needs json_schema if its type is "json_schema", and only then')
        if self.json_schema is not None:
            return structure_of_schema(self.json_schema.json_schema)
        return ANY_OBJECT if self.type == "json_object" else None


OBJECT = f"{BRANCH} object"
BY_SCHEMA = chosen_by(
    lambda value: TEXT if isinstance(value, str) else OBJECT if isinstance(value, dict) else None,
    "should be a JSON schema, as an object or a text",
)


class StructuredOutputs(Body):
    """vLLM's spelling of a structure: one of its fields."""

    off: ClassVar[Off] = {
        **at_null("structural_tag", "whitespace_pattern"),
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False, True),
        "disable_fallback": (False, True),
    }

    json_schema: Annotated[Annotated[dict[str, Any], Tag(OBJECT)] | Annotated[str, Tag(TEXT)], BY_SCHEMA] | None = (
        Field(None, alias="json")
    )
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: Literal[True] | None = None

    @property
    def structure(self) -> Structure:
        """The structure. Raises UserError unless exactly one field is given."""
        found = [] if self.json_schema is None else [_schema(self.json_schema)]
        found += [] if self.regex is None else [Structure(StructureKind.REGEX, self.regex)]
        found += [] if self.choice is None else [structure_of_choices(self.choice)]
        found += [] if self.grammar is None else [Structure(StructureKind.GRAMMAR, self.grammar)]
        found += [] if self.json_object is None else [ANY_OBJECT]
        if len(found) != 1:
            raise UserError("structured_outputs needs exactly one of json, regex, choice, grammar and json_object")
        return found[0]


def _schema(schema: dict[str, Any] | str) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, schema) if isinstance(schema, str) else structure_of_schema(schema)


class GenerationRequest(Body):
    """The fields that both endpoints share.

    ``ttft_goal_ms`` and ``tpot_goal_ms`` are ours: milliseconds to the first token, and per token after it, that are
    quick enough for this request.
    """

    ignores: ClassVar[frozenset[str]] = IGNORED

    model: str
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenName, float], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: Int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    ttft_goal_ms: Milliseconds | None = None
    tpot_goal_ms: Milliseconds | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    session_id: SessionName | None = None
    prompt_cache_key: SessionName | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Int | None = None

    @property
    def goals(self) -> Goals:
        """The request's own goals, in seconds."""
        ttft_ms, tpot_ms = self.ttft_goal_ms, self.tpot_goal_ms
        return Goals(ttft_s=ttft_ms and ttft_ms / 1e3, tpot_s=tpot_ms and tpot_ms / 1e3)

    @property
    def session(self) -> str:
        """The client's name for the session; "" if it gave none."""
        return self.session_id or self.prompt_cache_key or ""

    @property
    def usage_detail(self) -> UsageDetail:
        """Which events of the stream carry a usage. Raises UserError if ``stream_options`` needs ``stream``."""
        options = self.stream_options or StreamOptions()
        if not self.stream and (options.include_usage or options.continuous_usage_stats):
            raise UserError("stream_options needs stream to be true")
        if not options.include_usage:
            return UsageDetail.NONE
        return UsageDetail.EACH if options.continuous_usage_stats else UsageDetail.LAST

    def _sampling(self, max_tokens: int | None, logprobs: int | None, *, echoes: bool = False) -> SamplingParams:
        if self.prompt_logprobs is not None and self.stream:
            raise UserError("prompt_logprobs comes with the whole answer: leave it out, or stream")
        of_prompt = self.prompt_logprobs
        if echoes and logprobs is not None:
            of_prompt = max(logprobs, of_prompt or 0)
        given = {one.name: getattr(self, one.name, None) for one in fields(SamplingParams)}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        chosen |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": of_prompt}
        return SamplingParams(**{**chosen, "structure": self._structure()})

    @property
    def structure_field(self) -> str:
        """The field that asks for a structure, if one does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def _structure(self) -> Structure | None:
        asked = [one.structure for one in (self.response_format, self.structured_outputs) if one is not None]
        found = [one for one in asked if one is not None]
        if len(found) > 1:
            raise UserError("response_format and structured_outputs mean the same: give one of them")
        return found[0] if found else None


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``: one prompt or several, as text or as tokens."""

    off: ClassVar[Off] = {
        **OFF,
        **at_null("prompt_embeds", "suffix"),
        "add_special_tokens": (True,),
        "best_of": (1,),
    }

    prompt: Prompt
    logprobs: Int | None = None
    echo: bool | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing is to be generated: the answer is the prompt."""
        return self.max_tokens == 0 and self.echo is True

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises UserError if a value is out of its range."""
        if self.n is not None and self.n * len(self.prompts()) > MAX_PROMPTS:
            raise UserError(f"n times the number of prompts must be at most {MAX_PROMPTS}: send fewer prompts")
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        max_tokens = 1 if self.is_echo_alone else max_tokens  # an engine generates at least one, which is left out
        return self._sampling(max_tokens, self.logprobs, echoes=self.echo is True)

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


def _check_template_name(name: str) -> str:
    """Refuse names that are arguments of the function that renders templates."""
    if not name.isidentifier() or name in RESERVED_NAMES:
        raise ValueError("should be a name of the template's own variables")
    return name


RESERVED_NAMES = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
TemplateName = Annotated[str, Field(max_length=64), AfterValidator(_check_template_name)]


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``. Without ``max_tokens`` the answer may be as long as the model allows."""

    off: ClassVar[Off] = {
        **OFF,
        **at_null("audio", "chat_template", "prediction", "web_search_options"),
        "add_special_tokens": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "return_prompt_text": (False,),
        "verbosity": ("medium",),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[TemplateName, Any], Field(max_length=64)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    def template_options(self, template: str) -> dict[str, Any]:
        """The template's variables that the body gives, beside messages and tools. UserError if two contradict."""
        if self.add_generation_prompt and self.continue_final_message:
            raise UserError("add_generation_prompt and continue_final_message contradict each other: give one of them")
        given = {**(self.chat_template_kwargs or {}), "reasoning_effort": self.reasoning_effort}
        known = {name: value for name, value in given.items() if value is not None and name in template}
        if self.continue_final_message:
            return known | {"add_generation_prompt": False, "continue_final_message": True}
        return known | {"add_generation_prompt": self.add_generation_prompt is not False}

    @property
    def calls(self) -> ToolChoice:
        """Which calls the answer may or must have: by default any, if there are tools."""
        choice = self.tool_choice or "auto"
        return choice if self.tools or choice != "auto" else "none"

    @property
    def ignored(self) -> frozenset[str]:
        """The fields anywhere in the body and its messages that were given and ignored."""
        return super().ignored.union(*(message.ignored_fields for message in self.messages))

    @classmethod
    def also_ignores(cls, fields: Mapping[str, Any]) -> frozenset[str]:
        """Functions, if they must not be called."""
        return frozenset({"functions"} if fields.get("function_call") == "none" else ())

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises UserError if one is out of its range or two fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs needs logprobs to be true")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise UserError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {self.top_logprobs}")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise UserError(f"max_completion_tokens must be at least 1, not {self.max_completion_tokens}")
        check_choice(self.tools or (), self.calls)
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise UserError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self._sampling(limits.pop() if limits else None, (self.top_logprobs or 0) if self.logprobs else None)

    @property
    def structure_field(self) -> str:
        """As for completions; ``tools`` if calls must be made."""
        return super().structure_field if self.calls in ("none", "auto") else "tools"

    def _structure(self) -> Structure | None:
        """As for completions; calls that must be made are one, too."""
        found = super()._structure()
        if self.calls == "none":
            return found
        if found is not None:
            raise UserError('response_format and structured_outputs need tool_choice "none", or no tools')
        return call_structure(self.tools or (), self.calls, self.parallel_tool_calls is not False)
