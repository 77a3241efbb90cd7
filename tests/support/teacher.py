"""transformers as the oracle: it reads a prompt and an engine's tokens in one pass, and says what it would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import torch
import transformers

from tests.support.parity import Reference


@contextmanager
def _reads_once() -> Iterator[None]:
    """transformers reads a file's metadata twice, and maps names anew for each of its modules: 20 of 27 seconds."""
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


class Teacher:
    """The reference model in fp32; what it has read once, it does not read again.

    What it says of a position depends only on the tokens before: so the answer for the same tokens, or for the first of
    them, is already there.
    """

    def __init__(self, path: Path) -> None:
        with _reads_once():
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval()
        self._known: dict[tuple[int, ...], tuple[list[int], Reference]] = {}

    def read(self, prompt: Sequence[int], tokens: Sequence[int]) -> Reference:
        """Its own choice at each position of ``tokens``, and how far the second best was."""
        known_tokens, known = self._known.get(tuple(prompt), ([], None))
        if known is None or known_tokens[: len(tokens)] != list(tokens):
            known = self._compute(prompt, tokens)
            self._known[tuple(prompt)] = list(tokens), known
        return Reference(known.token_ids[: len(tokens)], known.gaps[: len(tokens)])

    def _compute(self, prompt: Sequence[int], tokens: Sequence[int]) -> Reference:
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens][:-1]]), logits_to_keep=len(tokens)).logits[0]
        best, token_ids = logits.topk(2)
        return Reference(token_ids[:, 0].tolist(), (best[:, 0] - best[:, 1]).tolist())
