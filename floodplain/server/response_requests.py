"""The body of ``/v1/responses``, and the conversation that it stands for: each body has the whole one.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, ValidationError

from floodplain.core.errors import UserError
from floodplain.server.fields import IGNORED, Body, Off, at_null, chosen_by
from floodplain.server.requests import BY_PARTS, TEXT, TEXTS, ChatRequest, Int, RequestId, SessionName, kind_of_text
from floodplain.server.tools import BY_KIND, FUNCTION, MAX_TOOLS, ChoiceWord, ToolName
from floodplain.web.errors import BRANCH


class _SentBack(Body):
    """A part of an earlier output: clients send it back with hints of the server."""

    ignores: ClassVar[frozenset[str]] = frozenset({"annotations", "id", "logprobs", "status"})


class TextContent(_SentBack):
    """A piece of a message or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


TextOrParts = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextContent], Field(min_length=1), Tag(TEXTS)],
    BY_PARTS,
]


def _text(content: TextOrParts) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(_SentBack):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrParts


class CallItem(_SentBack):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: ToolName
    arguments: str


class OutputItem(_SentBack):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: TextOrParts


def _kind(item: object) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"{BRANCH} {kind}"


Item = Annotated[
    Annotated[MessageItem, Tag(f"{BRANCH} message")]
    | Annotated[CallItem, Tag(f"{BRANCH} function_call")]
    | Annotated[OutputItem, Tag(f"{BRANCH} function_call_output")],
    chosen_by(_kind, "should be a message, a function_call or a function_call_output"),
]


Input = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag(TEXTS)],
    chosen_by(kind_of_text, "should be a string or a list of items"),
]


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of the chat endpoint."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class ResponseToolChoice(Body):
    """The choice of one function."""

    type: Literal["function"]
    name: ToolName


class ResponseTextFormat(Body):
    """What the text is: any text, any JSON object, or an object of a schema."""

    ignores: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def for_chat(self) -> dict[str, Any]:
        """The format in the form of the chat endpoint."""
        return {"type": self.type} | ({} if self.json_schema is None else {"json_schema": {"schema": self.json_schema}})


class ResponseText(Body):
    """How the text is to be."""

    off: ClassVar[Off] = {"verbosity": ("medium",)}

    format: ResponseTextFormat | None = None


class ResponseRequest(Body):
    """The body of ``/v1/responses``: text and function tools, and no state in the server."""

    off: ClassVar[Off] = {
        **at_null("conversation", "max_tool_calls", "previous_response_id", "prompt", "reasoning"),
        "background": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    ignores: ClassVar[frozenset[str]] = IGNORED | {"include", "stream_options"}

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ChoiceWord | Annotated[ResponseToolChoice, Tag(FUNCTION)], BY_KIND] | None = None
    parallel_tool_calls: bool | None = None
    priority: Int | None = None
    session_id: SessionName | None = None
    prompt_cache_key: SessionName | None = None
    request_id: RequestId | None = None

    def for_chat(self) -> ChatRequest:
        """The same request for the chat endpoint. Raises UserError for items that make no conversation."""
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        shared = [name for name in ChatRequest.model_fields if name in type(self).model_fields]
        fields: dict[str, Any] = {name: getattr(self, name) for name in shared}
        fields |= {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "response_format": self.text.format.for_chat() if self.text and self.text.format else None,
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": choice if self.tools or choice not in ("auto", "none") else None,
        }
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:  # a bound of the chat endpoint, such as its number of messages
            raise UserError(f"input: {error.errors()[0]['msg']}") from None

    def _messages(self) -> list[dict[str, Any]]:
        """The turns. Calls become part of the assistant's turn before them."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, MessageItem):
                turns.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, OutputItem):
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                turns[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        if not turns:
            raise UserError("input has no turns")
        return turns
