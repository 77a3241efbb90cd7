"""transformers as the oracle: it reads a prompt and an engine's tokens in one pass, and says what it would choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.parity import Reference


class Teacher:
    """The reference model in fp32; what it has read once, it does not read again.

    What it says of a position depends only on the tokens before: so the answer for the same tokens, or for the first of
    them, is already there.
    """

    def __init__(self, gguf: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
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
            logits = self._model(torch.tensor([[*prompt, *tokens][:-1]])).logits[0, len(prompt) - 1 :]
        best, token_ids = logits.topk(2)
        return Reference(token_ids[:, 0].tolist(), (best[:, 0] - best[:, 1]).tolist())
