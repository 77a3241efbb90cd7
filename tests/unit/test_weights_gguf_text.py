"""Tokenizers of ``.gguf`` files give llama.cpp's tokens; llama.cpp made the expected ids."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from floodplain.core.errors import UserError
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.fields import Fields
from floodplain.model.weights.gguf_tokenizer import BYTE_LEVEL, read_gguf_tokenizer
from tests.support.llama_texts import keys_of, read_data

NAMES = ("llama", *BYTE_LEVEL)


@lru_cache(maxsize=1)
def data() -> dict[str, Any]:
    return read_data()


def tokenizer(name: str, **changes: object) -> HfTokenizer:
    """The tokenizer of a name, with ``tokenizer.ggml.KEY`` changed, or left out where the value is None."""
    keys = {**keys_of(name, data()), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    fields = Fields({key: value for key, value in keys.items() if value is not None}, "m.gguf")
    return HfTokenizer(*read_gguf_tokenizer(fields))


def test_every_name_gives_texts_the_tokens_of_llama_cpp() -> None:
    rows = {defaults: name for name, defaults in BYTE_LEVEL.items()}  # names with equal defaults are tried once
    for name in ("llama", *rows.values()):
        ours = tokenizer(name)
        assert [ours.encode(text) for text in data()["texts"]] == data()["ids"][name], name
    assert all(data()["ids"][name] == data()["ids"][rows[defaults]] for name, defaults in BYTE_LEVEL.items())


def test_the_texts_distinguish_all_defaults() -> None:
    """Otherwise a wrong line of the table would pass."""
    assert len({str(ids) for ids in data()["ids"].values()}) == len(set(BYTE_LEVEL.values())) + 1
    assert set(data()["ids"]) == set(NAMES)


@pytest.mark.parametrize("name", ["llama", "smollm", "gpt-4o"])
def test_decoded_tokens_are_the_text(name: str) -> None:
    ours = tokenizer(name)
    for text in data()["texts"]:
        shown = text.replace("\u2581", " ") if name == "llama" else text  # SentencePiece does not distinguish these
        decoded = ours.decode(ours.encode(text, add_special_tokens=False))
        assert decoded == shown or (name == "llama" and "<" in text), text  # a space is added after special tokens


@pytest.mark.parametrize(
    ("name", "changes", "begins", "ends"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("qwen2", {"bos_token_id": None}, False, False),
        ("llama", {}, True, False),
        ("llama", {"add_bos_token": False, "add_eos_token": True}, False, True),
        ("llama", {"bos_token_id": None, "eos_token_id": None, "add_eos_token": True}, True, True),
    ],
)
def test_keys_decide_what_goes_around_a_text(name: str, changes: dict[str, Any], begins: bool, ends: bool) -> None:
    ours = tokenizer(name, **changes)
    inner = ours.encode("ab", add_special_tokens=False)
    keys = keys_of(name, data())
    first = [keys["tokenizer.ggml.bos_token_id"]] if begins else []
    last = [keys["tokenizer.ggml.eos_token_id"]] if ends else []
    assert ours.encode("ab") == [*first, *inner, *last]


def test_the_key_can_turn_off_the_added_space() -> None:
    plain, usual = tokenizer("llama", add_space_prefix=False), tokenizer("llama")
    assert plain.encode(" river") == usual.encode("river") != plain.encode("river")
    assert plain.decode(plain.encode(" river")[1:]) == " river"


def test_special_tokens_of_phi_3_drop_the_space_behind_them() -> None:
    keys = {**keys_of("llama", data()), "general.name": "Phi-3 mini"}
    phi = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf")))
    assert phi.encode("<|im_start|> \n a<s> b") == tokenizer("llama").encode("<|im_start|>a<s> b")


def test_answers_end_where_llama_cpp_ends_them() -> None:
    """Ends are set by keys and by texts of tokens."""
    ids = [str(token) for token in keys_of("qwen2", data())["tokenizer.ggml.tokens"]]  # type: ignore[attr-defined]
    by_text = {ids.index("<|end_of_text|>"), ids.index("<|im_end|>")}
    assert tokenizer("qwen2", eos_token_id=3, eot_token_id=5, fim_pad_token_id=7).eos_token_ids == {3, 5, 7} | by_text
    types = [1] * len(ids)
    assert tokenizer("qwen2", token_type=types).special_token_ids == by_text  # they are control tokens


def test_a_key_that_names_no_token_counts_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    ours = tokenizer("llama", padding_token_id=2**32 - 1, eos_token_id=10_000, eot_token_id=10_000)
    assert (ours.eos_token_ids, ours.encode("a")) == (tokenizer("llama").eos_token_ids, tokenizer("llama").encode("a"))
    assert [record.args[1] for record in caplog.records] == [  # type: ignore[index]
        f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "padding", "eot")
    ]


def test_chat_templates_have_tokens_that_are_not_special() -> None:
    template = "{{ bos_token }}|{{ eos_token }}"
    keys = {**keys_of("qwen2", data()), "tokenizer.ggml.eos_token_id": 3, "tokenizer.chat_template": template}
    ours = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf")))
    assert ours.render_chat([{"role": "user", "content": "a"}]) == "<|begin_of_text|>|$"
    assert ours.encode("a$b") == tokenizer("qwen2").encode("a$b")


def test_tools_take_the_template_for_tools() -> None:
    templates = {"": "plain", ".tool_use": "{{ tools | length }} tools", "s": ["tool_use"]}
    keys = {**keys_of("qwen2", data()), **{f"tokenizer.chat_template{name}": text for name, text in templates.items()}}
    ours, chat = HfTokenizer(*read_gguf_tokenizer(Fields(keys, "m.gguf"))), [{"role": "user", "content": "a"}]
    assert (ours.render_chat(chat), ours.render_chat(chat, [{"type": "function"}])) == ("plain", "1 tools")


@pytest.mark.parametrize("template", [5, True, ["a"], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_refused(template: object) -> None:
    keys = {**keys_of("qwen2", data()), "tokenizer.chat_template": template}
    with pytest.raises(ValueError, match="the chat template must be a text"):
        read_gguf_tokenizer(Fields(keys, "m.gguf"))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen2", {"pre": "qwen3"}, "pre='qwen3' is not supported, only 'default' or"),
        ("qwen2", {"model": "t5"}, "model='t5' is not supported"),
        ("qwen2", {"merges": ["! !", "!! \u00ff\u00ff"]}, "merges has '!! \u00ff\u00ff', of which a part is no token"),
        ("qwen2", {"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ("qwen2", {"tokens": ["a", "b", "a"], "token_type": None}, "tokens has 'a' more than once"),
        ("qwen2", {"bos_token_id": -1}, "bos_token_id=-1 must be a whole number from 0 on"),
        ("llama3", {"bos_token_id": 10_000}, "bos_token_id is missing: every text needs that token"),
        ("llama3", {"bos_token_id": None}, "bos_token_id is missing: every text needs that token"),
        ("qwen2", {"token_type": [1]}, "token_type=[1] must be a list of numbers, one for each"),
        ("llama", {"tokens": ["a", "b"], "scores": None, "token_type": None}, "must have all bytes, <0x00> to <0xFF>"),
        ("llama", {"scores": None}, "scores has the same number for"),
    ],
)
def test_what_cannot_be_done_as_llama_cpp_does_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        tokenizer(name, **changes)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_token_that_is_stored_twice_is_found_in_linear_time() -> None:
    class Counted(str):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    tokens = [Counted(f"t{number}") for number in range(1000)]
    with pytest.raises(UserError, match="tokens has 't999' more than once"):
        tokenizer("qwen2", tokens=[*tokens, Counted("t999")], token_type=None)
    assert Counted.num_compared < 10 * len(tokens)


def test_a_merge_that_is_stored_twice_counts_once() -> None:
    merges = ["a b", "b c", "ab c", "a b"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "abc"]
    ours = tokenizer("qwen2", merges=merges, tokens=letters, token_type=None, bos_token_id=None, eos_token_id=None)
    assert [ours.decode([token]) for token in ours.encode("abc")] == ["abc"]
