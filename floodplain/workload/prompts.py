"""Prompts of real text, cut or assembled to an exact number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from floodplain.workload.trace_row import MOONCAKE_BLOCK_TOKENS


class PromptTokenizer(Protocol):
    """The part of a tokenizer that a workload uses."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        ...


def machine_documents() -> list[str]:
    """Return long texts that every Python installation has: the language reference behind ``help()``."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


class PromptMaker:
    """Makes prompts of an exact length: a passage of a document, then a question.

    The passage comes first and starts anywhere, so that two prompts share a prefix only by ``prefix_ids``.
    Every document is encoded once, when it is first needed.

    Args:
        tokenizer: The tokenizer.
        questions: Endings of prompts; at least one.
        documents: Sources of passages; at least one. None: ``machine_documents()``.
        seed: Determines the text of the blocks that prefix ids name.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        questions: Sequence[str],
        documents: Sequence[str] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._questions = tuple(questions)
        self._documents = tuple(machine_documents() if documents is None else documents)
        self._seed = seed
        self._encoded: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text``; results are cached."""
        if text not in self._encoded:
            self._encoded[text] = tuple(self._tokenizer.encode(text))
        return self._encoded[text]

    def make_prompt_tokens(
        self,
        num_tokens: int,
        rng: np.random.Generator,
        *,
        prefix_ids: Sequence[int] = (),
        prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    ) -> tuple[int, ...]:
        """Return a prompt of exactly ``num_tokens`` tokens.

        Args:
            num_tokens: At least 1.
            rng: Chooses the question and the passage.
            prefix_ids: Names of the leading blocks; the same id always gives the same tokens. The rest of the prompt
                is made as without them.
            prefix_block_tokens: Tokens of one such block.
        """
        tokens: list[int] = []
        for prefix_id in prefix_ids:
            if len(tokens) >= num_tokens:
                break
            tokens.extend(self.prefix_block(prefix_id, prefix_block_tokens))
        missing = num_tokens - len(tokens)
        if missing > 0:
            question = self.encode(self._questions[rng.integers(len(self._questions))])[:missing]
            tokens.extend((*self._passage(missing - len(question), rng), *question))
        return tuple(tokens[:num_tokens])

    def prefix_block(self, prefix_id: int, num_tokens: int) -> tuple[int, ...]:
        """Return the block that a prefix id names: the same for equal id, length and seed."""
        return self._passage(num_tokens, np.random.default_rng((self._seed, prefix_id)))

    def _passage(self, num_tokens: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Return ``num_tokens`` tokens of running text, from one or more documents."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            document = self.encode(self._documents[rng.integers(len(self._documents))])
            if document:
                start = int(rng.integers(len(document)))
                tokens.extend(document[start : start + num_tokens - len(tokens)])
        return tuple(tokens)
