"""What requests say: real text, cut or assembled to an exact number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from floodplain.workload.trace_row import MOONCAKE_BLOCK_TOKENS


class PromptTokenizer(Protocol):
    """All that a workload needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        ...


def machine_documents() -> list[str]:
    """Return long texts that every Python carries: the chapters of the language reference behind ``help()``."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


class PromptMaker:
    """Makes prompts of an exact length: a passage of a document, then a question.

    The passage comes first and starts anywhere, so that two prompts share a prefix only where ``prefix_ids`` say so.
    Every document is encoded once, when it is first needed.

    Args:
        tokenizer: Turns text into tokens.
        questions: What prompts end with; at least one.
        documents: What fills them up; at least one, None takes ``machine_documents()``.
        seed: Decides what the blocks named by prefix ids hold.
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
        """Return the tokens of ``text``, remembered."""
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
            prefix_ids: Names of the leading blocks; the same id always gives the same tokens. What they do not fill
                is filled as without them.
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
        """Return ``num_tokens`` tokens of running text, from as many documents as it takes."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            document = self.encode(self._documents[rng.integers(len(self._documents))])
            if document:
                start = int(rng.integers(len(document)))
                tokens.extend(document[start : start + num_tokens - len(tokens)])
        return tuple(tokens)
