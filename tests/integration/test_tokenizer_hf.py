"""Tokenizers of transformers: real ones of both kinds, loaded as a user's are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from floodplain.core.errors import RequestRefused, UserError
from floodplain.engine import chat_template, hf_tokenizer
from floodplain.engine.hf_tokenizer import HfTokenizer
from floodplain.engine.tokenizer import StreamDecoder
from tests.support.examples import examples

CORPUS = [
    "the river floods the plain",
    "r\u00eaverie \u6cb3\u5ddd \U0001f30a wave",
    "def f(x):\n    return x + 1\n",
] * 3
SPECIAL = ["<s>", "</s>", "<|turn|>"]
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
    """As Llama 2's: spaces become a letter, one stands before the text, unknown characters fall back to bytes."""
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


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=examples(150))
def test_deltas_of_real_text_join_to_the_text_of_all_tokens(tokenizer: HfTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    decoder = StreamDecoder(tokenizer)
    deltas = [*(decoder.push(token) for token in tokens), decoder.flush()]
    assert "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(tokens=st.lists(st.integers(0, 340)), skips=st.booleans())
@settings(max_examples=examples(150))
def test_deltas_of_any_byte_level_tokens_join_to_the_text_of_all(
    tokenizer: HfTokenizer, tokens: list[int], skips: bool
) -> None:
    if not tokenizer.is_byte_level:
        pytest.skip("a law of byte-level tokenizers: SentencePiece shows a broken byte by what stands beside it")
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skips)
    deltas = [*(decoder.push(token) for token in tokens), decoder.flush()]
    assert "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=skips)


def test_chat_template(tokenizer: HfTokenizer) -> None:
    messages = [{"role": "user", "content": "the plain"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)).replace(" ", "") == "<|turn|>theplain"
    with pytest.raises(UserError, match="the chat template refuses these messages: no x"):
        tokenizer.apply_chat_template([{"role": "x", "content": ""}])


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
    monkeypatch.setattr(hf_tokenizer, "template_errors", lambda: chat_template.template_errors(max_render_s=0.05))
    with pytest.raises(RequestRefused, match=r"longer than 0\.05 seconds"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert sys.gettrace() is before


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level()).save_pretrained(tmp_path)
    tokenizer = HfTokenizer.from_folder(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', ""])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="the tokenizer cannot be loaded") as error:
        HfTokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)
