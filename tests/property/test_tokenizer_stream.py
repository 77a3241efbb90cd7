from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import StepOutputs
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.engine.shell import OutputProcessor
from floodplain.model.text_pieces import StreamDecoder
from floodplain.model.tokenizer import ByteTokenizer, Tokenizer


class SpacedTokenizer(ByteTokenizer):
    """Like SentencePiece: token 300 + n is a word with a space before it, which is removed at the start of the text."""

    is_byte_level = False
    words = (b" a", b" flood", b" plain", " \N{GREEK SMALL LETTER PI}".encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces = [self.words[t - 300] if t >= 300 else self.token_bytes(t) for t in token_ids if t not in skipped]
        return b"".join(pieces).removeprefix(b" ").decode(errors="replace")


BYTES = ByteTokenizer(300)
SPACED = SpacedTokenizer(304)
STOPS = st.lists(st.text("ab\N{BLACK HEART SUIT}", min_size=1, max_size=4), max_size=3)


def stream(tokenizer: Tokenizer, tokens: Sequence[int], **options: object) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(tokenizer, **options)  # type: ignore[arg-type]
    return [*(decoder.push(token) for token in tokens), decoder.flush()], decoder


@given(st.lists(st.integers(0, 299)), st.booleans())
def test_deltas_of_any_bytes_join_to_the_text_of_all_tokens(tokens: list[int], skips: bool) -> None:
    deltas, _ = stream(BYTES, tokens, skip_special_tokens=skips)
    assert "".join(deltas) == BYTES.decode(tokens, skip_special_tokens=skips)


@given(st.lists(st.one_of(st.text(max_size=5), st.integers(256, 303))))
def test_deltas_of_tokens_that_depend_on_neighbours_join_to_the_text(parts: list[str | int]) -> None:
    tokens = [t for part in parts for t in (part.encode() if isinstance(part, str) else (part,))]
    deltas, _ = stream(SPACED, tokens, skip_special_tokens=False)
    assert "".join(deltas) == SPACED.decode(tokens)


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop string that ends first, by definition."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(st.text("abc\N{BLACK HEART SUIT}", max_size=30), STOPS)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    deltas, decoder = stream(BYTES, list(text.encode()), stop=stops)
    assert "".join(deltas) == _before_stop(text, stops)
    assert decoder.is_stopped == any(stop in text for stop in stops)


@given(st.text("ab", max_size=20), STOPS)
def test_what_was_shown_is_never_part_of_a_stop_string_that_comes(text: str, stops: list[str]) -> None:
    decoder = StreamDecoder(BYTES, stop=stops)
    shown = ""
    for token in text.encode():
        shown += decoder.push(token)
        assert _before_stop(text, stops).startswith(shown)


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    deltas, decoder = stream(BYTES, b"a.b.c", stop=(".",), min_tokens=3)
    assert ("".join(deltas), decoder.is_stopped) == ("a.b", True)


@pytest.mark.parametrize(
    ("prompt", "text"), [((97,), " flood plain"), ((256,), "flood plain"), ((256, 97), " flood plain")]
)
def test_an_engine_s_text_continues_its_prompt(prompt: tuple[int, ...], text: str) -> None:
    processor, seq_id = OutputProcessor(SPACED), SeqId(0)
    request = Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(), arrival_s=0.0)
    processor.add(seq_id, request, Lifecycle(0.0))
    steps = [StepOutputs([seq_id], [301], {}), StepOutputs([seq_id], [302], {seq_id: FinishReason.LENGTH})]
    assert "".join(delta.text for step in steps for _, delta in processor.process(step)) == text


def test_broken_bytes_do_not_pile_up() -> None:
    decoder = StreamDecoder(SPACED)
    deltas = [decoder.push(0xFF) for _ in range(100)]
    assert sum(map(len, deltas)) > 80


def test_byte_tokenizer_round_trip_and_chat() -> None:
    assert (
        BYTES.decode(BYTES.encode("h\N{LATIN SMALL LETTER E WITH ACUTE}!")) == "h\N{LATIN SMALL LETTER E WITH ACUTE}!"
    )
    chat = BYTES.apply_chat_template([{"role": "user", "content": "hi"}])
    assert BYTES.decode(chat) == "user: hi\nassistant:"
    assert BYTES.decode([104, 256], skip_special_tokens=True) == "h"
