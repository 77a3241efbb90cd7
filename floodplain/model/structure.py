"""Masks of structured answers, functions of structure and tokens so far, made by llguidance beside the steps."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from floodplain.core.errors import UserError
from floodplain.core.sampling import Structure, StructureKind
from floodplain.files.parsing import parsing
from floodplain.model.hf_tokenizer import HfTokenizer
from floodplain.model.tokenizer import Tokenizer, reachable

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.int32]
"""One bit for each token, lowest first, [ceil(vocab / 32)]; the tokenizer may have more tokens than the model."""

NUM_KEPT = 64
"""Compiled grammars that a process keeps."""

MAX_LEXER_STATES = 20_000
"""A state takes up to 2 KB. The other limits of llguidance bound a mask to about 15 ms."""

FIRST_FUEL = 100_000
"""Of the first mask, for which all requests wait. With llguidance's million, nested repetitions took seconds."""

STACK_BYTES = 2**28
"""llguidance recurses from rule to rule: 2,000 take 8 MiB, and a grammar may have 9,000. Only used pages are memory."""

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as ``json.dumps`` writes: where whitespace is free, small models write it without end."""


def structure_of_schema(schema: Any) -> Structure:
    """Return the structure of a JSON schema, given as a JSON value."""
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))


def structure_of_choices(texts: Sequence[str]) -> Structure:
    """Return the structure of an answer that is one of several texts."""
    return Structure(StructureKind.CHOICE, json.dumps(texts))


class Grammars:
    """The grammars of one tokenizer and vocabulary. Methods may be called on several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)  # llguidance takes no tokenizer with more tokens
        self._ends = reachable(tokenizer.eos_token_ids, vocab_size)
        self._compiled = lru_cache(NUM_KEPT)(lambda structure: _compiler().submit(self._compile, structure).result())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structure masks")
        self._llguidance_tokenizer: Any = None

    def check(self, structure: Structure, field: str = "structure") -> None:
        """Compile a structure, in up to a second; UserError, with its ``field``, if that fails."""
        with parsing(field, f"its {structure.kind.value} cannot be followed"):  # llguidance may also panic
            self._compiled(structure)

    def begin(self, structure: Structure, output: Sequence[int]) -> StructureState:
        """The state of a structure that ``check`` has accepted, after some tokens of output."""
        matcher = self._compiled(structure).deep_copy()
        return StructureState(matcher, self._vocab_size, self._ends, self._thread, output)

    def is_whole(self, structure: Structure, output: Sequence[int]) -> bool:
        """Whether an output has its structure, or did not end by itself: at ``max_tokens``, or at a stop string."""
        if not output or output[-1] not in self._ends:
            return True
        matcher = self._compiled(structure).deep_copy()
        return bool(matcher.consume_tokens(list(output[:-1])) and matcher.is_accepting())

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if not self._ends:
            raise UserError("response_format and structured_outputs need a model with an end-of-sequence token")
        if self._llguidance_tokenizer is None:
            self._llguidance_tokenizer = _llguidance_tokenizer(self._tokenizer, self._vocab_size, sorted(self._ends))
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=FIRST_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._llguidance_tokenizer, _grammar(structure), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        return matcher


@lru_cache(maxsize=1)
def _compiler() -> ThreadPoolExecutor:
    """The thread that compiles. Beyond the end of its stack the process would end."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="structures")
        pool.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return pool


@lru_cache(maxsize=8)
def grammars_of(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    """The grammars of a tokenizer for a model's vocabulary; the same object for the same arguments."""
    return Grammars(tokenizer, vocab_size)


class StructureState:
    """Which tokens may follow the output so far. Masks are made on a thread, while the next step runs."""

    def __init__(
        self, matcher: Any, vocab_size: int, ends: frozenset[int], thread: ThreadPoolExecutor, output: Sequence[int]
    ) -> None:
        self._matcher, self._num_words, self._ends, self._thread = matcher, -(-vocab_size // 32), ends, thread
        self._next: Future[Mask] = thread.submit(self._advance, tuple(output))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output. They must be those that the masks allowed."""
        self._next = self._thread.submit(self._advance, tuple(token_ids))

    def mask(self) -> Mask:
        """The mask of the next token; waits until it is made. If llguidance gave up, it allows the end alone."""
        return self._next.result()

    def _advance(self, token_ids: tuple[int, ...]) -> Mask:
        from llguidance.numpy import fill_next_token_bitmask

        was_good = not self._matcher.is_error()
        self._matcher.consume_tokens([token for token in token_ids if token not in self._ends])
        mask: Mask = np.zeros(self._num_words, dtype=np.int32)
        fill_next_token_bitmask(self._matcher, mask[None])
        if was_good and self._matcher.is_error():
            logger.warning("a structured answer ends early: %s", _first_line(self._matcher.get_error()))
        return mask


def _grammar(structure: Structure) -> str:
    """The structure in llguidance's form. ValueError if its content is malformed."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    content = structure.content
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return str(LLMatcher.grammar_from_json_schema(content, overrides=JSON_STYLE))
        case StructureKind.REGEX:
            return str(LLMatcher.grammar_from_regex(content))
        case StructureKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(any_to_lark(content) if "::=" in content else content))
        case StructureKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(content)))}"))


def _first_line(text: str) -> str:
    """The first line of a message that says something, at most 300 characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:300]


def _llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, HfTokenizer):
        return LLTokenizer(tokenizer.serialized(), n_vocab=vocab_size, eos_token=ends)
    return LLTokenizer(TokenizerWrapper(_Bytes(tokenizer, vocab_size)), n_vocab=vocab_size, eos_token=ends)


class _Bytes:
    """A byte tokenizer in the form that llguidance takes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"))
