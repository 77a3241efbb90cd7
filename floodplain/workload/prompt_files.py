"""Reads prompts from files: a text on each line of a JSONL file, or the conversations of a ShareGPT file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from floodplain.core.errors import UserError
from floodplain.files.parsing import listed
from floodplain.workload.columns import parse_count, prefix_ids_of, read_json_rows

logger = logging.getLogger(__name__)

TEXT_KEYS = ("prompt", "text_input", "text")
OUTPUT_KEYS = ("output_tokens", "output_length")
_USERS = frozenset({"human", "user"})
_ASSISTANTS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text.

    Attributes:
        text: Not empty.
        output_tokens: Length of its answer, if the file has it.
        prefix_ids: Names of blocks of 512 tokens before the text; equal leading ids give equal leading text.
        answer: The recorded answer, if the file has one; only its length is used.
    """

    text: str
    output_tokens: int | None = None
    prefix_ids: tuple[int, ...] = ()
    answer: str | None = None


def load_prompts(path: Path) -> list[Prompt]:
    """Read prompts from JSONL, or from a JSON list.

    A row is a text under ``prompt`` (aiperf: ``text_input``, ``text``), with ``output_tokens`` (``output_length``) and
    ``hash_ids`` if it has them; or a conversation of ShareGPT, of which the first question and its answer are used.
    Conversations that do not begin with a question and an answer are skipped; one log line has their number.

    Raises:
        UserError: Unreadable, no prompt, or a row without one.
    """
    prompts, num_left_out = [], 0
    for where, row in read_json_rows(path):
        prompt = _first_turns(where, row["conversations"]) if "conversations" in row else _prompt_of(path, where, row)
        num_left_out += prompt is None
        prompts += [prompt] if prompt else []
    if num_left_out:
        logger.warning("%s: %d conversations that begin without a question are left out", path, num_left_out)
    if not prompts:
        raise UserError(f'{path} holds no prompt: expected lines such as {{"prompt": "…"}}')
    return prompts


def _prompt_of(path: Path, where: str, row: Mapping[str, Any]) -> Prompt:
    text = next((row[key] for key in TEXT_KEYS if row.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        is_trace = "timestamp" in row and "input_length" in row
        hint = " (is it a trace? give it as --trace)" if is_trace else ""
        raise UserError(f'{where} has keys {listed(row)}; it needs a text under "prompt"{hint}')
    output = next(((key, row[key]) for key in OUTPUT_KEYS if row.get(key) is not None), None)
    return Prompt(text, None if output is None else parse_count(path, *output), prefix_ids_of(row, where))


def _first_turns(where: str, turns: object) -> Prompt | None:
    """The first question of a conversation, and its answer; None if it does not begin with both."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        raise UserError(f"{where}: conversations must be a list of turns with from and value")
    said = [(turn.get("from"), turn.get("value")) for turn in turns if turn.get("from") != "system"][:2]
    match said:
        case [(user, str(question)), (assistant, str(answer))] if user in _USERS and assistant in _ASSISTANTS:
            return Prompt(question, answer=answer) if question.strip() and answer.strip() else None
        case _:
            return None


def package_prompts() -> list[Prompt]:
    """Return the prompts that come with the package: chat, code, summaries, translations, lists, sums, letters."""
    with resources.as_file(resources.files("floodplain.workload") / "data" / "prompts.jsonl") as path:
        return load_prompts(path)
