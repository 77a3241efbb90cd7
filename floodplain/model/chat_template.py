"""Renders chat templates in a sandbox, as ``apply_chat_template`` of transformers does (docs: Writing a template)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, of which templates read one of the first two."""
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands at the end of a message that is continued; its space shows whether the template trims."""


class TemplateTooSlow(Exception):
    """A template runs for too long: it must not go on."""


def choose_template(templates: str | Mapping[str, str], *, has_tools: bool) -> str:
    """The template of a conversation, of a model with one or several. Raises ValueError if none is the default."""
    if isinstance(templates, str):
        return templates
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ValueError(f"the model has multiple chat templates, {', '.join(sorted(templates))}, and no default")
    return templates[name]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The text of a conversation; with ``continue_final_message`` up to the last message's end. May raise any error."""
    if not messages:
        raise ValueError("the conversation has no message")
    chat = [_with_reasoning({key: value for key, value in one.items() if value is not None}) for one in messages]
    if _reads_parts(template):
        chat = [{**one, "content": _parts(one["content"])} if "content" in one else one for one in chat]
    if continue_final_message:
        chat[-1], ending = _marked(chat[-1], template)
    text = _compile(template).render(
        **{"documents": None, **variables},
        messages=_plain(chat),
        tools=_plain(tools) or None,
        add_generation_prompt=add_generation_prompt,
    )
    return _cut(text, ending) if continue_final_message else text


@lru_cache(maxsize=16)
def _reads_parts(template: str) -> bool:
    """Whether a template shows a content that is a list of parts, and drops one that is a text (Llama Guard 3 1B)."""

    def shows(content: Any) -> bool:
        chat, names = [{"role": "user", "content": content}], dict.fromkeys(("bos_token", "eos_token"), "")
        try:
            text = _compile(template).render(messages=chat, documents=None, tools=None, **names)
        except TemplateTooSlow:
            raise
        except Exception:  # a template may raise anything: then it does not say which form it reads
            return False
        return _MARK.strip() in text

    return not shows(_MARK) and shows(_parts(_MARK))


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(message: Mapping[str, Any], template: str) -> tuple[dict[str, Any], str]:
    """The message with the mark behind its text, and that text."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("continue_final_message: the last message has no content that the template shows")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    parts = [dict(part) for part in content]
    last = next((part for part in reversed(parts) if "text" in part), None)
    if last is None:
        raise ValueError("continue_final_message: the last message has no text")
    ending = str(last["text"])
    last["text"] = ending + _MARK
    return {**message, "content": parts}, ending


def _cut(text: str, ending: str) -> str:
    """The text up to the mark; without the spaces before it, if the template trimmed the mark's own."""
    place = text.rfind(_MARK.strip())
    if place < 0 or ending.strip() not in text:
        raise ValueError("continue_final_message: the template does not show the last message as it is")
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _plain(value: Any) -> Any:
    """A copy of JSON data: a template gets no object with methods of its own."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else f"<{type(value).__name__}>"


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dictionaries(), namespace=_namespace_class()
    )
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dictionaries:
    """``dict`` for templates, without the attributes of the class."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


@lru_cache(maxsize=1)
def _namespace_class() -> type[Any]:
    """Jinja's ``namespace``, whose attributes must not begin with an underscore: those of Python do."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class PublicNamespace(Namespace):
        def __init__(*args: Any, **items: Any) -> None:
            Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **items).items():
                args[0][name] = value

        def __setitem__(self, name: Any, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")
            Namespace.__setitem__(self, name, value)

    return PublicNamespace


@lru_cache(maxsize=1)
def _generation_block() -> type[Any]:
    """``{% generation %}``, with which templates mark answers for training; here it is only its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> Any:
            return caller()

    return GenerationBlock
