"""Prompts of real text, read or assembled to an exact number of tokens, and the form in which they are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from floodplain.core.errors import UserError
from floodplain.files.parsing import listed
from floodplain.workload.columns import parse_count, prefix_ids_of, read_json_rows
from floodplain.workload.records import LoadRequest
from floodplain.workload.traces import MOONCAKE_BLOCK_TOKENS

logger = logging.getLogger(__name__)

TEXT_KEYS = ("prompt", "text_input", "text")
OUTPUT_KEYS = ("output_tokens", "output_length")
_USERS = frozenset({"human", "user"})
_ASSISTANTS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, which is not empty.

    Attributes:
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
    Others are skipped; one log line has their number. Raises UserError if it is unreadable, or has no prompt, or a row
    without one.
    """
    prompts, num_left_out = [], 0
    for where, row in read_json_rows(path):
        prompt = _first_turns(where, row["conversations"]) if "conversations" in row else _prompt_of(where, row)
        num_left_out += prompt is None
        prompts += [prompt] if prompt else []
    if num_left_out:
        logger.warning("%s: %d conversations that begin without a question are left out", path, num_left_out)
    if not prompts:
        raise UserError(f'{path} holds no prompt: expected lines such as {{"prompt": "…"}}')
    return prompts


def _prompt_of(where: str, row: Mapping[str, Any]) -> Prompt:
    text = next((row[key] for key in TEXT_KEYS if row.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        is_trace = "timestamp" in row and "input_length" in row
        hint = " (is it a trace? give it as --trace)" if is_trace else ""
        raise UserError(f'{where} has keys {listed(row)}; it needs a text under "prompt"{hint}')
    output = next(((key, row[key]) for key in OUTPUT_KEYS if row.get(key) is not None), None)
    return Prompt(text, None if output is None else parse_count(where, *output), prefix_ids_of(row, where))


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
    """Makes prompts of an exact length: a passage of a document, then one of the ``questions``.

    The passage comes first and starts anywhere, so that two prompts share a prefix only by ``prefix_ids``. Every
    document (``machine_documents``) is encoded once, when it is first needed. ``seed`` determines the text of
    the blocks that prefix ids name.
    """

    def __init__(self, tokenizer: PromptTokenizer, questions: Sequence[str], *, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._questions = tuple(questions)
        self._documents = tuple(machine_documents())
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
        """A prompt of exactly ``num_tokens`` tokens, at least 1.

        ``prefix_ids`` name leading blocks of ``prefix_block_tokens``; the same id always gives the same tokens. The
        rest of the prompt is made as without them.
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
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            document = self.encode(self._documents[rng.integers(len(self._documents))])
            if document:
                start = int(rng.integers(len(document)))
                tokens.extend(document[start : start + num_tokens - len(tokens)])
        return tuple(tokens)


WAYS = ("auto", "tokens", "text")
SEND_HELP = (
    "prompts as token ids, whose lengths are exact, or as text, whose lengths follow the server's usage; auto: as "
    "token ids, and as text if the server refuses them"
)
_REFUSALS = frozenset({400, 415, 422, 500, 501})
"""Statuses of servers that do not support prompts of token ids."""


class PromptForm:
    """The form of prompts for one server, one of ``WAYS``, else UserError; ``decode`` makes a text of token ids."""

    def __init__(self, way: str = "auto", decode: Callable[[Sequence[int]], str] | None = None) -> None:
        if way not in WAYS:
            raise UserError(f"--send must be one of {', '.join(WAYS)}, not {way!r}")
        self._decode = decode
        self._is_settled = way != "auto"
        self._sends_text = way == "text"

    def of(self, request: LoadRequest) -> Iterator[list[int] | str]:
        """The prompt as the server accepts it; before that is known, ids, then text. Raises UserError without one."""
        if request.prompt_token_ids and not self._sends_text:
            yield list(request.prompt_token_ids)
            if self._is_settled and not self._sends_text:
                return
        if request.prompt is not None:
            yield request.prompt
        elif self._decode is not None:
            yield self._decode(request.prompt_token_ids)
        elif self._sends_text:
            raise UserError(f"{request.request_id} has no text to send")

    def note(self, prompt: list[int] | str, status: int, server: str) -> bool:
        """Note the server's HTTP status for a prompt as it was sent. True if it may accept another form of it."""
        if status == 200 and not self._is_settled:
            self._is_settled, self._sends_text = True, isinstance(prompt, str)
            if self._sends_text:
                logger.warning("%s takes no token ids: prompts are sent as text, lengths follow its usage", server)
        return status in _REFUSALS and not isinstance(prompt, str)
