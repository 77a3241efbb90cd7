from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from floodplain.model.token_bound import TokenBound

CORPUS = ["the plain is wide, the river is slow    \n\n\n", "été 東京 naïve 12345 " * 3, "aaaaaaaaaaaaaaaaaaaaaaaa"]
BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(alphabet: list[str], **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    train(tokenizer, alphabet, ["<unk>"])
    return tokenizer


def split_and_composed() -> Tokenizer:
    """A tokenizer like Qwen's: NFC, a pattern, bytes."""
    tokenizer = byte_level(list(BYTE_OF))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+|\w+"), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A tokenizer like Llama 2's: a space is a letter, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    train(tokenizer, [], ["<unk>", *FALLBACK])
    return tokenizer


def train(tokenizer: Tokenizer, alphabet: list[str], special: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|a rather long special token|>"])


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "all bytes": lambda: byte_level(list(BYTE_OF)),
    "some bytes": lambda: byte_level([]),
    "some bytes, unknown ones joined": lambda: byte_level([], unk_token="<unk>", fuse_unk=True),
    "split and composed": split_and_composed,
    "sentence pieces": sentence_pieces,
}
made = cache(lambda kind: MAKERS[kind]())


def bound_of(tokenizer: Tokenizer) -> TokenBound | None:
    return TokenBound.of(tokenizer.to_str(), BYTE_OF)


pieces = st.sampled_from(
    [*CORPUS, *FALLBACK[:3], "<|a rather long special token|>", " ", "\n" * 9, "e\u0301", "ᄀ\u1161\u11a8", "K"]
)
texts = st.lists(pieces | st.text(st.characters(codec="utf-8"), max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("kind", MAKERS)
def test_no_text_has_fewer_tokens_than_the_bound(kind: str) -> None:
    tokenizer = made(kind)
    bound = bound_of(tokenizer)
    assert bound is not None
    best = 0.0

    @given(texts)
    def check(text: str) -> None:
        nonlocal best
        num_tokens, least = len(tokenizer.encode(text, add_special_tokens=False)), bound.least_tokens(text)
        assert least <= num_tokens
        best = max(best, least / max(num_tokens, 1))

    check()
    check.hypothesis.inner_test("aaaaaaaaaaaaaaaaaaaaaaaa" * 50)
    assert best > 0.2, "the bound says next to nothing"


def dropping(change: Callable[[dict[str, Any]], object], kind: str = "all bytes") -> str:
    settings = json.loads(made(kind).to_str())
    change(settings)
    return json.dumps(settings)


@pytest.mark.parametrize(
    "settings",
    [
        dropping(lambda s: s["added_tokens"][0].update(lstrip=True)),
        dropping(lambda s: s.update(truncation={"max_length": 4})),
        dropping(lambda s: s.update(normalizer={"type": "Strip"})),
        dropping(lambda s: s.update(normalizer={"type": "Lowercase"})),
        dropping(lambda s: s.update(normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "})),
        dropping(lambda s: s.update(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": "    "})),
        dropping(lambda s: s.update(pre_tokenizer={"type": "WhitespaceSplit"})),
        dropping(lambda s: s.update(pre_tokenizer={"type": "Split", "behavior": "Removed"})),
        dropping(lambda s: s.update(pre_tokenizer=None)),
        dropping(lambda s: s["model"].update(type="Unigram")),
        dropping(lambda s: s["model"]["vocab"].pop("<0x07>"), "sentence pieces"),
        dropping(lambda s: s["model"].update(byte_fallback=False), "sentence pieces"),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(settings: str) -> None:
    assert TokenBound.of(settings, BYTE_OF) is None


def test_a_special_token_that_strips_spaces_beats_any_bound() -> None:
    """Ten thousand spaces become one token: such a tokenizer has no bound."""
    tokenizer = MAKERS["all bytes"]()
    tokenizer.add_special_tokens([AddedToken("<strip>", lstrip=True)])
    assert len(tokenizer.encode(" " * 10_000 + "<strip>").ids) == 1
    assert bound_of(tokenizer) is None
