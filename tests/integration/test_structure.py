"""Structured answers of random models: they have their structure, also after preemptions, elsewhere, and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from floodplain import LLM, SamplingParams
from floodplain.core.errors import UserError
from floodplain.core.sampling import ANY_OBJECT, MAX_STRUCTURE_CHARS, Structure, StructureKind
from floodplain.model import structure as structure_module
from floodplain.model.fast_tokenizer import FastTokenizer
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.structure import Grammars, structure_of_choices, structure_of_schema
from floodplain.model.tokenizer import ByteTokenizer
from tests.support.examples import examples
from tests.support.served_model import MODEL, asking_model

FLAGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_model_len": 512}
VOCAB = 300
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", 'n"o', "a|b", "\\d+", "\u00e9\U0001f600"]
STRUCTURES: dict[str, tuple[Structure, Callable[[str], bool]]] = {
    "schema": (structure_of_schema(SCHEMA), lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    "choice": (structure_of_choices(CHOICES), lambda text: text in CHOICES),
    "regex": (
        Structure(StructureKind.REGEX, r"(ab|[0-9]{2}x){1,3}"),
        lambda text: re.fullmatch(r"(ab|[0-9]{2}x){1,3}", text) is not None,
    ),
    "gbnf": (
        Structure(StructureKind.GRAMMAR, 'root ::= "<" word+ ">"\nword ::= [a-c] | "\u00e9"'),
        lambda text: re.fullmatch(r"<[a-c\u00e9]+>", text) is not None,
    ),
    "grammar": (
        Structure(StructureKind.GRAMMAR, 'start[capture]: "<" word ">"\nword: /[a-c]{1,4}/'),
        lambda text: re.fullmatch(r"<[a-c]{1,4}>", text) is not None,
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_answers_of_a_random_model_have_their_structure(name: str) -> None:
    structure, is_right = STRUCTURES[name]
    prompts = [{"prompt_token_ids": [index]} for index in range(12)]
    with LLM(MODEL, **FLAGS) as llm:
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=300, structure=structure)
        answers = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    assert all(answer.finish_reason == "stop" and is_right(answer.text) for answer in answers), answers
    assert len({answer.text for answer in answers}) > 1


@settings(max_examples=examples(30), deadline=None)
@given(name=st.sampled_from(sorted(STRUCTURES)), data=st.data())
def test_a_state_that_begins_with_known_tokens_has_the_masks_of_one_that_grew(name: str, data: st.DataObject) -> None:
    grammars = Grammars(ByteTokenizer(VOCAB), VOCAB)
    grown, output = grammars.begin(STRUCTURES[name][0], ()), list[int]()
    for _ in range(40):
        allowed = np.unpackbits(grown.mask().view(np.uint8), bitorder="little")[:VOCAB].nonzero()[0].tolist()
        resumed = grammars.begin(STRUCTURES[name][0], output)
        assert resumed.mask().tolist() == grown.mask().tolist()
        token = data.draw(st.sampled_from(allowed))
        if token == 256:
            assert STRUCTURES[name][1](ByteTokenizer(VOCAB).decode(output))
            return
        output.append(token)
        grown.extend((token,))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (structure_of_schema({"type": "foo"}), "field: its json_schema cannot be followed .*foo"),
        (Structure(StructureKind.REGEX, "a(b"), "field: its regex cannot be followed "),
        (Structure(StructureKind.GRAMMAR, "start: foo"), "cannot be followed .*foo"),
        (Structure(StructureKind.GRAMMAR, 'start: / "test"\n'), "field: its grammar cannot be followed"),  # a panic
        (Structure(StructureKind.JSON_SCHEMA, "{"), "field: its json_schema cannot be followed"),
    ],
)
def test_a_structure_that_cannot_be_followed_is_one_line(structure: Structure, message: str) -> None:
    with pytest.raises(UserError, match=message) as problem:
        Grammars(ByteTokenizer(VOCAB), VOCAB).check(structure, "field")
    assert "\n" not in str(problem.value)


def test_tokens_without_logits_and_ends_that_are_none_are_left_out_of_masks() -> None:
    """Of fine-tuned models: a padding token without a row in the embedding, and -1 for an end that is none."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**letters, "</s>": 256, "[PAD]": 257}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "[PAD]"])
    grammars = Grammars(HfTokenizer(FastTokenizer(backend), [-1, 256, 257, 300]), 257)
    state = grammars.begin(structure_of_choices(["ab"]), backend.encode("ab").ids)
    assert np.unpackbits(state.mask().view(np.uint8), bitorder="little")[:257].nonzero()[0].tolist() == [256]


def test_rules_that_lead_to_each_other_do_not_end_the_process() -> None:
    """Of a grammar and of a schema, as many as there may be; with a stack of 8 MiB 3,000 were too many."""
    rules = "".join(f"r{number:x}:r{number + 1:x}\n" for number in range(5000))
    schemas = {f"{number:x}": {"items": {"$ref": f"#/$defs/{number + 1:x}"}} for number in range(1600)}
    schema = {"$ref": "#/$defs/0", "$defs": {**schemas, f"{1600:x}": {}}}
    for kind, content in (
        (StructureKind.GRAMMAR, f'start:r0\n{rules}r{5000:x}:"a"'),
        (StructureKind.JSON_SCHEMA, schema),
    ):
        text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
        Grammars(ByteTokenizer(VOCAB), VOCAB).check(Structure(kind, text))


def test_a_structure_has_a_bounded_size() -> None:
    with pytest.raises(UserError, match="more than 65536: simplify it"):
        Structure(StructureKind.REGEX, "a" * (MAX_STRUCTURE_CHARS + 1))


@pytest.mark.parametrize(
    "fields", [{"ignore_eos": True}, {"min_tokens": 1}, {"allowed_token_ids": (1,)}, {"bad_words": ("a",)}]
)
def test_fields_that_contradict_a_structure_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="do not go with a structured answer"):
        SamplingParams(structure=ANY_OBJECT, **fields)


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


def test_clients_get_objects_of_their_classes_and_errors_that_name_the_field() -> None:
    chat: list[Any] = [{"role": "user", "content": "who?"}]
    with asking_model() as client:
        parsed = client.chat.completions.parse(model=MODEL, messages=chat, response_format=Person, n=2, seed=1)
        assert all(isinstance(choice.message.parsed, Person) for choice in parsed.choices)
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
        for asked in ({"response_format": bad}, {"tools": [tool], "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model=MODEL, messages=chat, **asked)
            assert refused.value.param == next(iter(asked)) and "json_schema cannot be followed" in str(refused.value)
        for extra, expected in (({"choice": ["up", "down"]}, {"up", "down"}), ({"regex": "[ab]"}, {"a", "b"})):
            done = client.completions.create(
                model=MODEL, prompt="x", extra_body={"structured_outputs": extra}, max_tokens=9, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in done) in expected
        with pytest.raises(openai.BadRequestError, match="exactly one of json, regex"):
            client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": {}})


def test_an_answer_whose_grammar_is_given_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_module, "MAX_LEXER_STATES", 1)
    structure = {"structured_outputs": {"regex": "(ab|cd|[0-9]{3}x)*e{7}"}}  # in no other test: it is compiled here
    with asking_model() as client, pytest.raises(openai.InternalServerError, match="became too complex to follow"):
        client.completions.create(model=MODEL, prompt="x", extra_body=structure, max_tokens=99)


SIDES = {"turn": ["left", "right"], "go": ["up", "down"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"side": {"$ref": "#/$defs/Side"}},
                "required": ["side"],
                "additionalProperties": False,
                "$defs": {"Side": {"enum": sides}},
            },
        },
    }
    for name, sides in SIDES.items()
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_calls_that_must_be_made_are_made_streamed_or_not(choice: Any) -> None:
    chat: list[Any] = [
        {"role": "user", "content": "where?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"side": "left"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "a wall"},
    ]
    with asking_model(1024) as client:
        how: dict[str, Any] = {"model": MODEL, "messages": chat, "tools": TOOLS, "tool_choice": choice, "seed": 4}
        done = client.chat.completions.create(**how, parallel_tool_calls=False)
        (call,) = done.choices[0].message.tool_calls or ()
        assert call.type == "function" and (choice == "required" or call.function.name == "go")
        assert json.loads(call.function.arguments)["side"] in SIDES[call.function.name]
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == (None, "tool_calls")
        names, arguments, reasons = list[str](), "", list[str]()
        for chunk in client.chat.completions.create(**how, parallel_tool_calls=False, stream=True):
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert piece.index == 0 and piece.function is not None
                names += [piece.function.name] if piece.function.name else []
                arguments += piece.function.arguments or ""
        assert (names, arguments, reasons) == ([call.function.name], call.function.arguments, ["tool_calls"])
