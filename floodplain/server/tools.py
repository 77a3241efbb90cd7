"""Functions that a model may call: how clients describe them, and what they send back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from floodplain.core.errors import UserError
from floodplain.core.sampling import Structure
from floodplain.model.structure import structure_of_schema
from floodplain.server.fields import Body, chosen_by
from floodplain.web.bodies import parse_json
from floodplain.web.errors import BRANCH, ApiError

MAX_TOOLS = 128
"""The most functions of a request, as in the OpenAI API."""

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function: its name, what it does, and the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool. There are only functions."""

    type: Literal["function"]
    function: Function


class CalledFunction(Body):
    """A function's name, and its arguments as JSON."""

    ignores_others: ClassVar[bool] = True

    name: ToolName
    arguments: str


class ToolCall(Body):
    """A call in an earlier turn of the model."""

    ignores_others: ClassVar[bool] = True

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def templated(self) -> dict[str, Any]:
        """The call in the form of chat templates, whose arguments are an object.

        Others, such as those of a call that ``max_tokens`` cut, are none, as in vLLM: each later turn has them again.
        """
        try:
            arguments = parse_json(self.function.arguments.encode())
        except ApiError:
            arguments = None
        arguments = arguments if isinstance(arguments, dict) else {}
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class NamedFunction(Body):
    """The name of a function."""

    name: ToolName


class NamedChoice(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


WORD, FUNCTION = f"{BRANCH} word", f"{BRANCH} function"


def _kind_of_choice(value: object) -> str | None:
    return WORD if isinstance(value, str) else FUNCTION if isinstance(value, dict | Body) else None


BY_KIND = chosen_by(_kind_of_choice, 'should be "none", "auto", "required" or an object that names a function')
ChoiceWord = Annotated[Literal["none", "auto", "required"], Tag(WORD)]
ToolChoice = Annotated[ChoiceWord | Annotated[NamedChoice, Tag(FUNCTION)], BY_KIND]


def call_structure(tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool) -> Structure | None:
    """Return the structure of an answer that must be calls; None if it may be text.

    One function that is named: its arguments. Any: a list of objects with ``name`` and ``parameters``.
    """
    if isinstance(choice, NamedChoice):
        (found,) = [tool.function for tool in tools if tool.function.name == choice.function.name]
        return structure_of_schema(found.parameters or {"type": "object"})
    if choice != "required":
        return None
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(tool) for tool in tools]}}
    if not is_parallel:
        schema["maxItems"] = 1
    return structure_of_schema(schema | {"$defs": {tool.function.name: _parameters(tool) for tool in tools}})


def _call(tool: Tool) -> dict[str, Any]:
    properties = {"name": {"const": tool.function.name}, "parameters": {"$ref": _place(tool)}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _parameters(tool: Tool) -> Any:
    return _moved(tool.function.parameters or {"type": "object"}, _place(tool))


def _place(tool: Tool) -> str:
    return f"#/$defs/{tool.function.name}"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts are right at a place in another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    target = schema.get("$ref")
    return moved | ({"$ref": place + target[1:]} if isinstance(target, str) and target.startswith("#") else {})


def check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise UserError, which names the field, if a choice names no tool, or tools have the same name."""
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise UserError("tools: two functions have the same name")
    if choice == "required" and not names:
        raise UserError('tool_choice is "required", and tools is empty')
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise UserError(f"tool_choice names {choice.function.name!r}, which is none of tools")
