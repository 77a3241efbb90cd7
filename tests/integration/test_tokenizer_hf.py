"""Real tokenizers of transformers, byte-level and SentencePiece-like, loaded as a user's are."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from floodplain.core.errors import RequestRefused, UserError
from floodplain.model import hf_tokenizer as own
from floodplain.model.fast_tokenizer import FastTokenizer
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.network.fields import Fields
from floodplain.model.text_pieces import StreamDecoder
from floodplain.model.weights.gguf_tokenizer import read_gguf_tokenizer
from tests.support.examples import examples
from tests.support.llama_texts import keys_of, read_data

CORPUS = [
    "the river floods the plain",
    "r\u00eaverie \u6cb3\u5ddd \U0001f30a wave",
    "def f(x):\n    return x + 1\n",
] * 3
SPECIAL = ["<s>", "</s>", "<|turn|>"]
BROKEN_END = "a\ufffd"
"""A token that ends like an incomplete character. Llama 2's vocabulary has U+FFFD too."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    "<|turn|>{{ m.content }}{% endfor %}"
)


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return backend


def _sentencepiece_like() -> Backend:
    """Like Llama 2's: spaces become a letter, one is prepended, unknown characters fall back to bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<s>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?<!\u2581)(?=\u2581)"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        CORPUS[:1], trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL, *byte_tokens])
    )
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]  # the bytes are ordinary tokens
    content["model"]["vocab"][BROKEN_END] = len(content["model"]["vocab"])
    return Backend.from_str(json.dumps(content))


@pytest.fixture(scope="module", params=[_byte_level, _sentencepiece_like])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=request.param(), bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|turn|>"]
    )
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp(request.param.__name__)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_folder(folder, [1, 2])


def test_special_tokens_and_ends_of_sequence(tokenizer: HfTokenizer) -> None:
    assert tokenizer.eos_token_ids == {1, 2}
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_an_added_token_that_is_renumbered_is_refused(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    think = {**content["added_tokens"][0], "id": 900, "content": "<think>", "special": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": [*content["added_tokens"], think]}))
    with pytest.raises(UserError, match=r"'<think>' is token 900 in tokenizer.json, and \d+ in use"):
        HfTokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # read without transformers
    with pytest.raises(UserError, match=r"is token 900 in tokenizer.json"):
        HfTokenizer.from_folder(tmp_path)


def test_a_token_beyond_a_gap_of_ids_has_its_text(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = HfTokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 901
    assert streamed(tokenizer, [], [900, 899, 900]) == tokenizer.decode([900, 899, 900]) != ""


# -- the text of tokens ------------------------------------------------------------------------------------------------


def _words(decoder: decoders.Decoder | None, vocab: dict[str, int]) -> Backend:
    backend = Backend(models.WordLevel(vocab | {"<s>": len(vocab), "</s>": len(vocab) + 1}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    return backend


def _gemma_like() -> Backend:
    """Like Gemma's: with fallback to bytes, and no space is stripped."""
    backend = _sentencepiece_like()
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


PIECES = {"\u2581": 0, "\u2581\u2581": 1, "\u2581the": 2, "fl": 3, "ood": 4, "\u2581\ufffd": 5, "\u00e9": 6}
KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": _byte_level,
    "byte-level in a sequence": lambda: _with_decoder(_byte_level(), decoders.Sequence([decoders.ByteLevel()])),
    "sentencepiece": _sentencepiece_like,
    "gemma": _gemma_like,
    "metaspace": lambda: _words(decoders.Metaspace(), PIECES),
    "metaspace without a first space": lambda: _words(decoders.Metaspace(prepend_scheme="never"), PIECES),
    "wordpiece": lambda: _words(decoders.WordPiece(), {"the": 0, "##s": 1, ".": 2, "flood": 3, "##": 4, "'": 5}),
    "suffixes": lambda: _words(decoders.BPEDecoder("</w>"), {"the</w>": 0, "fl": 1, "ood</w>": 2, "</w>": 3}),
    "gguf, bytes": lambda: _of_gguf("smollm"),
    "gguf, sentencepiece": lambda: _of_gguf("llama"),
    "no decoder": lambda: _words(None, {"the": 0, "flood": 1, "\ufffd": 2}),
}


def _of_gguf(name: str) -> Backend:
    backend: Backend = read_gguf_tokenizer(Fields(keys_of(name, read_data()), "m.gguf"))[0].backend
    return backend


def _with_decoder(backend: Backend, decoder: decoders.Decoder) -> Backend:
    backend.decoder = decoder
    return backend


@lru_cache
def tokenizer_of(kind: str) -> HfTokenizer:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), bos_token="<s>", eos_token="</s>")
    return HfTokenizer(FastTokenizer(fast.backend_tokenizer, fast.special_tokens_map, fast.chat_template))


def streamed(tokenizer: HfTokenizer, prompt: list[int], output: list[int], **options: Any) -> str:
    decoder = StreamDecoder(tokenizer, prompt, **options)
    return "".join([*(decoder.push(token) for token in output), decoder.flush()])


def shows_a_character_of_a_broken_run(tokenizer: HfTokenizer, prompt: list[int], output: list[int]) -> bool:
    """Whether an invalid run of byte tokens begins with whole characters, which are shown before."""
    places = [(tokenizer.fallback_byte(token), i) for i, token in enumerate([*prompt, *output])]
    for is_run, items in itertools.groupby(places, key=lambda place: place[0] is not None):
        run = list(items)
        if not is_run or run[-1][1] < len(prompt):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            bytes(byte for byte, _ in run if byte is not None).decode()
            continue
        for end in range(1, len(run)):
            with contextlib.suppress(UnicodeDecodeError):
                bytes(byte for byte, _ in run[:end] if byte is not None).decode()
                return True
    return False


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(
    data=st.data(), kind=st.sampled_from(sorted(KINDS)), skips=st.booleans(), stops=st.sampled_from([(), ("e", " x")])
)
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_prompt_and_streamed_text_are_the_decoded_whole(
    data: st.DataObject, kind: str, skips: bool, stops: tuple[str, ...]
) -> None:
    tokenizer = tokenizer_of(kind)
    parts = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    tokens = st.lists(
        st.one_of(parts, st.integers(0, tokenizer.vocab_size + 1).map(lambda token: [token])), max_size=12
    )
    prompt, output = (list(itertools.chain(*data.draw(tokens))) for _ in range(2))
    hidden = tokenizer.special_token_ids if skips else frozenset()
    kept = [[t for t in some if t < tokenizer.vocab_size and t not in hidden] for some in (prompt, output)]
    assume(not shows_a_character_of_a_broken_run(tokenizer, *kept))
    before, whole = tokenizer.decode(kept[0]), tokenizer.decode([*kept[0], *kept[1]])
    text = streamed(tokenizer, prompt, output, skip_special_tokens=skips)
    if kind == "byte-level in a sequence" and "\ufffd" in whole:
        return  # broken bytes look as they do after the last few tokens: only ``ByteLevel`` alone is known to be bytes
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:  # the prompt ends within a character, which the output completes
        assert whole.endswith(text) and before.endswith("\ufffd")
    stopped = streamed(tokenizer, prompt, output, skip_special_tokens=skips, stop=stops)
    assert stopped == _cut(text, stops)


@pytest.mark.parametrize("kind", ["byte-level", "gguf, sentencepiece"])
def test_a_stop_string_that_is_a_special_token_is_found(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    turn, special = tokenizer.encode("the</s>fl", add_special_tokens=False), tokenizer.encode("</s>")[-1]
    assert special in tokenizer.special_token_ids
    assert streamed(tokenizer, [], turn, stop=["</s>"]) == streamed(tokenizer, [], turn, stop=["</s>", "hex"]) == "the"
    assert streamed(tokenizer, [], turn, stop=["</s>"], skip_special_tokens=False) == "the"
    assert streamed(tokenizer, [], turn, stop=["</s>"], min_tokens=9).startswith("the") is True
    assert len(streamed(tokenizer, [], turn, stop=["</s>"], min_tokens=9)) > len("the")
    assert streamed(tokenizer, [], turn, stop=["</s"]) == streamed(tokenizer, [], turn)
    assert streamed(tokenizer, [], turn, stop=["he", "</s>"]) == "t"


def _cut(text: str, stops: tuple[str, ...]) -> str:
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


@given(text=TEXTS, kind=st.sampled_from(["byte-level", "sentencepiece", "gemma"]))
@settings(max_examples=examples(150))
def test_no_piece_of_a_whole_text_holds_a_part_of_a_character(text: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(f"the {text}", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, tokens[:1])
    deltas = [*(decoder.push(token) for token in tokens[1:]), decoder.flush()]
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"", b"\xff\xff", "\ufffd\ufffd"),
        (b"", b"\xe2\x82", "\ufffd\ufffd"),
        (b"\xe2\x82", b"\xac", "\u20ac"),
        (b"\xe2\x82", b"", ""),
        (b"\xe2\x82", b"\xff", "\ufffd"),
        (b"", b"\xc3\xa9\xff", "\u00e9\ufffd"),  # decoded whole: three U+FFFD; but the letter was shown already
    ],
)
def test_byte_tokens_are_characters_or_one_broken_character_each(
    kind: str, prompt: bytes, output: bytes, text: str
) -> None:
    tokenizer = tokenizer_of(kind)
    number = tokenizer._tokenizer.backend.token_to_id
    tokens = [[number("t"), *(number(f"<0x{b:02X}>") for b in some)] for some in (prompt, output)]
    assert streamed(tokenizer, tokens[0], tokens[1][1:]) == text


@pytest.mark.parametrize("after", [b"\xff", b"\xc3", b"\xc3\xa9"])
def test_a_token_that_ends_with_a_broken_character_keeps_its_text_before_bytes(after: bytes) -> None:
    tokenizer = tokenizer_of("sentencepiece")
    number = tokenizer._tokenizer.backend.token_to_id
    tokens = [number(BROKEN_END), *(number(f"<0x{byte:02X}>") for byte in after)]
    assert streamed(tokenizer, [], tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("end", [[0] * 300, "\u6cb3" * 200, "the plain"])
def test_a_long_prompt_is_continued_as_a_short_one(end: list[int] | str) -> None:
    """The part that is kept for speed may begin in special tokens, in a run of bytes, or in words."""
    tokenizer = tokenizer_of("sentencepiece")
    words = tokenizer.encode("the river " * 100, add_special_tokens=False)
    tail = tokenizer.encode(end, add_special_tokens=False) if isinstance(end, str) else end
    letter = tokenizer.encode("\u6cb3", add_special_tokens=False)[-3:]  # three byte tokens
    output = [*letter, *tokenizer.encode("plain", add_special_tokens=False)]
    whole = tokenizer.decode([*words, *tail, *output], skip_special_tokens=True)
    before = tokenizer.decode([*words, *tail], skip_special_tokens=True)
    assert before + streamed(tokenizer, [*words, *tail], output) == whole


def test_a_token_is_spelled_with_its_space() -> None:
    tokenizer = tokenizer_of("metaspace")
    assert [tokenizer.token_text(token) for token in (0, 2, 3, 6)] == [" ", " the", "fl", "\u00e9"]


def test_chat_template(tokenizer: HfTokenizer) -> None:
    messages = [{"role": "user", "content": "the plain"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)).replace(" ", "") == "<|turn|>theplain"
    with pytest.raises(UserError, match="the chat template refuses these messages: no x"):
        tokenizer.apply_chat_template([{"role": "x", "content": ""}])


def test_tools_are_shown_by_the_template_or_refused(folder: Path) -> None:
    tokenizer, tools = HfTokenizer.from_folder(folder), [{"type": "function", "function": {"name": "fly"}}]
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match="tools: the model's chat template does not show any"):
        tokenizer.render_chat(chat, tools)
    tokenizer._tokenizer.chat_template = (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}"
    )
    assert (tokenizer.render_chat(chat, tools), tokenizer.render_chat(chat)) == ("flya", "a")
    tokenizer._tokenizer.chat_template = {"default": "b", "tool_use": "with {{ tools | length }}"}
    assert (tokenizer.render_chat(chat, tools), tokenizer.render_chat(chat)) == ("with 1", "b")


def test_options_are_variables_of_the_template(folder: Path) -> None:
    tokenizer, chat = HfTokenizer.from_folder(folder), [{"role": "user", "content": "a"}]
    thinks = "{{ 'thinks' if enable_thinking else 'answers' }}"
    ends = f"{{% if add_generation_prompt %}}|{thinks}{{% endif %}}"
    tokenizer._tokenizer.chat_template = f"{{{{ messages[-1].content }}}}{ends}"
    assert tokenizer.render_chat(chat) == "a|answers"
    assert tokenizer.render_chat(chat, (), {"enable_thinking": True}) == "a|thinks"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.render_chat(chat, (), options) == "a"


@pytest.mark.parametrize(
    ("template", "quoted"),
    [
        ({"rag": "a", "tool_use": "b"}, "multiple chat templates"),
        ("{{ 'abc'.index('z') }}", "ValueError: substring not found"),
        ("{{ '{q}'.format() }}", "KeyError: 'q'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.name }}", "'nothing' is undefined"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for m in messages %}", "endfor"),
        ("{{ raise_exception('say \\n please') }}", "say please"),
        ("{{ raise_exception('x' * 10000) }}", "xxx"),
        ("{% include 'other' %}", "no loader"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_any_failure_of_a_template_is_one_line_that_quotes_it(
    folder: Path, template: str | dict[str, str], quoted: str
) -> None:
    broken = HfTokenizer.from_folder(folder)
    broken._tokenizer.chat_template = template
    with pytest.raises(RequestRefused, match="the chat template refuses these messages") as caught:
        broken.apply_chat_template([{"role": "user", "content": "a"}])
    message = str(caught.value)
    assert quoted in message and "\n" not in message and len(message) < 400
    assert caught.value.field == "messages"


def test_a_template_that_does_not_end_is_stopped(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, endless = sys.gettrace(), "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", endless)
    monkeypatch.setattr(own, "template_errors", partial(own.template_errors, max_render_s=0.05))
    with pytest.raises(RequestRefused, match=r"longer than 0\.05 seconds"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert sys.gettrace() is before


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level()).save_pretrained(tmp_path)
    tokenizer = HfTokenizer.from_folder(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


PANIC = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [], %s}'
MISSING_TOKEN = (
    '"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], '
    '"pair": [], "special_tokens": {}}'
)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"version": "1.0"}',
        "",
        "[" * 100_000,
        PANIC % '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}',
        PANIC % MISSING_TOKEN,
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="the tokenizer cannot be loaded") as error:
        HfTokenizer.from_folder(tmp_path)
    assert capfd.readouterr().err == ""
    assert "\n" not in str(error.value)
