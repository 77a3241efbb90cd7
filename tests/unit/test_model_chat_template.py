"""Our rendering of chat templates against transformers', and the limits of the sandbox."""

from __future__ import annotations

from itertools import product
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from floodplain.model.chat_template import choose_template, render

WITH_TOOLS = """{%- set ns = namespace(n=0, last='') %}
{%- if tools %}{{ tools | tojson(indent=1) }} {{ tools[0] | tojson(separators=(',', ':'), sort_keys=true) }}{% endif %}
{%- for message in messages %}
    {%- if message.content is not defined %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- set parts = message.content if message.content is not string else [{'text': message.content}] %}
    <|{{ message.role }}|>{{ parts | map(attribute='text') | join }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}|{{ message.thinking }}</think>{% endif %}
    {%- if ns.n == 3 %}{% break %}{% endif %}
{% endfor %}
{%- generation %}{{ bos_token }}{{ documents is none }}{{ dict(a=ns.n).items() | list }}{% endgeneration %}
{%- if add_generation_prompt %}<|assistant|>{{ 'think' if enable_thinking else '' }}{% endif %}"""
SHOWS_ALL = "{% for m in messages %}{{ m | tojson }}{{ m.name is defined }}{% endfor %}{{ tools }}"
TRIMS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}{{ nothing }}"
HIDES = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
REFUSES = "{% if messages[0].role != 'system' %}{{ raise_exception('content: no system') }}{% endif %}"
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "a <b> & 'c' \u6cb3 "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "  q ", "name": None}],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "x", "thinking": "t"}],
    [{"role": "assistant", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two "}]}],
    [{"role": "assistant", "content": "y ", "reasoning": "r"}] * 5,
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]}],
    [{"role": "user", "content": "q", "tool_calls": None}, {"role": "tool", "content": None, "reasoning": None}],
    [{"role": "user", "content": []}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "strict": None, "parameters": {"b": 1, "a": "<\u6cb3>"}}}]


TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<s>": 0}, "<s>")), bos_token="<s>")


def by_transformers(template: str, chat: list[dict[str, Any]], tools: Any, ways: dict[str, Any]) -> str:
    values = {"tools": tools or None, "enable_thinking": True, **ways}
    return str(TOKENIZER.apply_chat_template(chat, chat_template=template, tokenize=False, **values))


VARIABLES = {"bos_token": "<s>", "enable_thinking": True}
WAYS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
]


def outcome(call: Any) -> str:
    try:
        return f"text: {call()}"
    except Exception as error:
        return "refused by the template" if isinstance(error, jinja2.TemplateError) else "refused"


def test_a_template_that_reads_only_lists_of_parts_gets_texts_as_such() -> None:
    """That of Llama Guard 3 1B shows nothing of a content that is a text."""
    loop = "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    template = "{% for m in messages %}<" + loop + ">{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant"}, *CHATS[3]]
    assert render(template, chat, (), {}) == "<a><><one two >"
    continued = render(template, chat[:1], (), {}, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<a"


def test_a_conversation_has_the_text_of_transformers() -> None:
    seen = []
    for template, chat, tools, ways in product(
        (WITH_TOOLS, SHOWS_ALL, TRIMS, HIDES, REFUSES), CHATS, ((), TOOLS), WAYS
    ):
        ours = outcome(lambda: render(template, chat, tools, VARIABLES, **ways))  # noqa: B023 - called at once
        assert ours == outcome(lambda: by_transformers(template, chat, list(tools), ways)), (template, chat, ways)  # noqa: B023
        seen.append(ours.partition(":")[0])
    assert {one: seen.count(one) > 5 for one in seen} == {
        "text": True, "refused": True, "refused by the template": True
    }  # fmt: skip


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    assert render(TRIMS.replace("| trim", "[0].text"), chat, (), {}, continue_final_message=True) == "<|user|>a"
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ dict.__class__ }}",
        "{{ dict.mro() }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ ''.format.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='x') %}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    chat = [{"role": "user", "content": "a"}]
    found = outcome(lambda: render(template, chat, (), {}))
    assert found in ("text: ", "refused by the template")
    assert found == outcome(lambda: by_transformers(template, chat, None, {}))


def test_the_time_is_that_of_the_machine_in_the_form_of_the_template() -> None:
    chat = [{"role": "user", "content": "a"}]
    assert render("{{ strftime_now('%%') }}", chat, (), {}) == "%"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", chat, (), {})) == len("2000-01-01")


def test_tools_take_the_template_for_tools_if_there_is_one() -> None:
    several = {"default": "a", "tool_use": "b"}
    assert [choose_template(several, has_tools=some) for some in (True, False)] == ["b", "a"]
    assert choose_template({"default": "a"}, has_tools=True) == choose_template("a", has_tools=True) == "a"
    with pytest.raises(ValueError, match=r"multiple chat templates, rag, tool_use, and no default"):
        choose_template({"tool_use": "b", "rag": "c"}, has_tools=False)
