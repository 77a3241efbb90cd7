"""transformers as the oracle for the demo's model in fp32: its current outputs, and its committed greedy answers.

``python -m tests.support.teacher`` writes them again (five minutes); ``tests/integration/test_models_smollm2.py``
compares them with current outputs of transformers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from floodplain import LLM, SamplingParams
from floodplain.model.weights.open_model import open_model, packaged_smollm2
from floodplain.workload.prompts import package_prompts
from tests.support.parity import Reference

DATA = Path(__file__).with_name("greedy_answers.json.gz")
NUM_TEXTS, NUM_CHATS, NUM_TOKENS = 64, 8, 64
MAX_GAP = 0.01
"""Larger gaps are not committed: no rule needs their size."""


def the_texts() -> list[str]:
    """Return the demo's prompts, and each again with a prefix."""
    prompts = [prompt.text for prompt in package_prompts()]
    return (prompts + [f"Answer briefly. {text}" for text in prompts])[:NUM_TEXTS]


def the_chats() -> list[list[dict[str, str]]]:
    """Return some of the texts as conversations."""
    return [[{"role": "user", "content": text}] for text in the_texts()[:: NUM_TEXTS // NUM_CHATS]]


@cache
def known_answers() -> Mapping[tuple[int, ...], Reference]:
    """Return answers by the prompt's tokens: 64 tokens for a text, up to an end token for a chat."""
    rows = json.loads(gzip.decompress(DATA.read_bytes()))
    return {tuple(row["prompt"]): Reference(row["tokens"], _gaps(row)) for row in rows}


def _gaps(row: Mapping[str, Any]) -> list[float]:
    return [row["near"].get(str(index), MAX_GAP) for index in range(len(row["tokens"]))]


@contextmanager
def _reads_once() -> Iterator[None]:
    """Cache gguf's reader and name map: transformers calls them repeatedly, which takes 20 of 27 seconds."""
    import gguf

    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


class Teacher:
    """The reference model in fp32."""

    def __init__(self, path: Path) -> None:
        import transformers

        with _reads_once():
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval()

    def read(self, prompt: Sequence[int], tokens: Sequence[int]) -> Reference:
        """Return its own choice at each position of ``tokens``, and the gap to the second best, in one pass."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens][:-1]]), logits_to_keep=len(tokens)).logits[0]
        return _choices(logits)

    def answer(self, prompt: Sequence[int], ends: Sequence[int] | None) -> Reference:
        """Return its own greedy answer, token by token, up to one of ``ends``."""
        with torch.inference_mode():
            answer = self._model.generate(
                torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=ends,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return _choices(torch.cat(answer.logits))


def _choices(logits: torch.Tensor) -> Reference:
    best, token_ids = logits.topk(2)
    return Reference(token_ids[:, 0].tolist(), (best[:, 0] - best[:, 1]).tolist())


def _write() -> None:
    """Write an undisturbed engine's answers where transformers makes the same choices; else transformers' own."""
    whole: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    with LLM("smollm2", dtype="float32", kv_memory=2**29, max_model_len=1024) as llm:
        outputs = llm.generate(the_texts(), SamplingParams(ignore_eos=True, **whole), use_tqdm=False)
        chats = llm.chat(the_chats(), SamplingParams(**whole), use_tqdm=False)
    ends = sorted(open_model("smollm2").load_tokenizer().eos_token_ids)
    rows, teacher = [], Teacher(packaged_smollm2())
    for output in outputs + chats:
        prompt, tokens = output.prompt_token_ids, list(output.outputs[0].token_ids)
        answer = teacher.read(prompt, tokens)
        if answer.token_ids != tokens:
            answer = teacher.answer(prompt, ends if output in chats else None)
        near = {index: round(gap, 7) for index, gap in enumerate(answer.gaps) if gap < MAX_GAP}
        rows.append({"prompt": list(prompt), "tokens": answer.token_ids, "near": near})
    DATA.write_bytes(gzip.compress(json.dumps(rows, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    _write()
