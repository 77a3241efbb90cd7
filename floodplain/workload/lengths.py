"""Lengths of prompts and outputs: from a file, or generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from floodplain.core.errors import UserError
from floodplain.workload.columns import (
    OUTPUT_COLUMNS,
    PROMPT_COLUMNS,
    find_column,
    parse_count,
    read_csv,
)

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of requests, pair by pair: two arrays ``[n]``, each value at least 1."""

    prompt_tokens: IntArray
    output_tokens: IntArray

    def sample(self, num_requests: int, rng: np.random.Generator) -> Lengths:
        """Return ``num_requests`` pairs, drawn with replacement; a pair stays together."""
        rows = rng.integers(len(self.prompt_tokens), size=num_requests)
        return Lengths(self.prompt_tokens[rows], self.output_tokens[rows])

    def fitted(self, scale: float, max_input: int | None, max_output: int | None) -> Lengths:
        """Return the lengths times ``scale``, at least 1, cut at the given maxima (None: no cut)."""
        return Lengths(_fit(self.prompt_tokens, scale, max_input), _fit(self.output_tokens, scale, max_output))


def _fit(tokens: IntArray | FloatArray, scale: float, maximum: int | None) -> IntArray:
    return np.clip(np.rint(tokens * scale), 1, maximum).astype(np.int64)


def load_lengths(path: Path) -> Lengths:
    """Read ``prompt_tokens,output_tokens`` of a CSV, but for pairs with a zero. Raises UserError if none is usable."""
    header, rows = read_csv(path)
    prompt_column = find_column(path, header, PROMPT_COLUMNS)
    output_column = find_column(path, header, OUTPUT_COLUMNS)
    pairs = [
        (parse_count(path, prompt_column, row[prompt_column]), parse_count(path, output_column, row[output_column]))
        for row in rows
    ]
    usable = np.array([pair for pair in pairs if min(pair) > 0], dtype=np.int64).reshape(-1, 2)
    if not len(usable):
        raise UserError(f"{path} holds no row with a prompt and an output of at least one token")
    return Lengths(usable[:, 0], usable[:, 1])


def chat_like(num_requests: int, rng: np.random.Generator) -> Lengths:
    """Draw chat-like lengths: log-normal, many short prompts and a long tail.

    The parameters are the mean and deviation of log lengths of single-turn ShareGPT chats (medians about 56 and 210
    tokens, means about 250 and 400), cut at 4096 and 1024 tokens.
    """
    prompts = np.exp(rng.normal(4.02, 1.72, num_requests))
    outputs = np.exp(rng.normal(5.35, 1.15, num_requests))
    return Lengths(_fit(prompts, 1.0, 4096), _fit(outputs, 1.0, 1024))
