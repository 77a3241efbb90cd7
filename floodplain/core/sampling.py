"""Sampling parameters: how the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from floodplain.core.errors import UserError
from floodplain.core.ranges import MAX_COUNT, Range, Text

MAX_STRUCTURE_CHARS = 2**16
"""The most characters of a schema, a grammar or a list of choices."""


class StructureKind(StrEnum):
    """How a structure is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Structure:
    """The texts that an answer may be: those of a JSON schema, a regular expression, a grammar or a list.

    UserError if it is longer than ``MAX_STRUCTURE_CHARS``.

    ``content``: a schema or a list as JSON, a regex of Rust's ``regex``, a grammar of llguidance (Lark) or in GBNF.
    """

    kind: StructureKind
    content: Annotated[str, Text(MAX_STRUCTURE_CHARS, is_line=False)]

    def __post_init__(self) -> None:
        if len(self.content) > MAX_STRUCTURE_CHARS:
            length = f"{len(self.content)} characters, more than {MAX_STRUCTURE_CHARS}"
            raise UserError(f"the structure (response_format, structured_outputs) has {length}: simplify it")


ANY_OBJECT = Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}')


MAX_LOGPROBS = 20
"""The most alternatives that a request may ask for at each position, as in the OpenAI API."""

MAX_CHOICES = 128
"""The most choices of one request, as in the OpenAI API."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM."""

MAX_BIAS = 100.0
"""The largest bias of a token, and the negative of the smallest, as in the OpenAI API."""

Penalty = Annotated[float, Range(-2.0, 2.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling fields of a request, with vLLM's names and defaults. UserError names one out of range.

    Attributes:
        n: Choices: answers to the same prompt, each with a seed of its own.
        max_tokens: Most tokens to generate; None means as many as ``max_model_len`` leaves.
        min_tokens: Fewest tokens before an end-of-sequence token or a stop condition may end the request.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: Keep this many of the likeliest tokens; 0 or -1 keeps all.
        min_p: Keep the tokens whose probability is at least this share of the likeliest token's, in [0, 1].
        presence_penalty: Subtracted from the logit of each token of the output, in [-2, 2].
        frequency_penalty: Subtracted once for each time that the token is in the output, in [-2, 2].
        repetition_penalty: Divides positive logits of tokens in prompt or output, multiplies negative ones; above 0.
        logit_bias: (token id, what is added to its logit, in [-100, 100]); a mapping becomes such pairs.
        allowed_token_ids: The only tokens that may be chosen; None allows all.
        bad_words: Texts that the output must not have.
        bad_token_ids: Sequences of tokens that the output must not have. The engine adds those of ``bad_words``.
        structure: What the output must look like up to its end-of-sequence token. Fields that forbid that end, or
            tokens by their ids, do not go with it.
        seed: Makes the request's own samples reproducible, however it is batched or preempted; -1 is None.
        stop: The request ends before the first of these strings in its text.
        ignore_eos: Go on past end-of-sequence tokens (to replay a trace at its own length).
        logprobs: Report the chosen token's log-probability and this many alternatives; None reports none.
        prompt_logprobs: The same for each token of the prompt but the first. Such a prompt is computed as a whole.
        skip_special_tokens: Leave special tokens out of the text.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Range(-1, MAX_COUNT)] = 0
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Range(0.0, math.inf)] = 1.0
    logit_bias: tuple[tuple[int, Annotated[float, Range(-MAX_BIAS, MAX_BIAS)]], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    structure: Structure | None = None
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: object = self.stop  # callers from untyped code pass one string, or lists
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "bad_token_ids", tuple(map(tuple, self.bad_token_ids)))
        for is_good, problem in self._checks():
            if not is_good:
                raise UserError(problem)

    def _checks(self) -> tuple[tuple[bool, str], ...]:
        return (*self._length_checks(), *self._choice_checks(), *self._penalty_checks(), *self._token_checks())

    def _length_checks(self) -> tuple[tuple[bool, str], ...]:
        max_tokens = self.max_tokens
        return (
            (1 <= self.n <= MAX_CHOICES, f"n must be between 1 and {MAX_CHOICES}, not {self.n}"),
            (max_tokens is None or max_tokens >= 1, f"max_tokens must be at least 1, not {max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must not be negative, not {self.min_tokens}"),
            (
                max_tokens is None or self.min_tokens <= max_tokens,
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({max_tokens})",
            ),
        )

    def _choice_checks(self) -> tuple[tuple[bool, str], ...]:
        logprobs, of_prompt = self.logprobs, self.prompt_logprobs
        return (
            (
                of_prompt is None or 0 <= of_prompt <= MAX_LOGPROBS,
                f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, not {of_prompt}",
            ),
            (
                math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
                f"temperature must be between 0 and 100, not {self.temperature}",
            ),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}"),
            (self.top_k >= -1, f"top_k must be -1, 0 (both: all tokens) or more, not {self.top_k}"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**64,
                f"seed must fit in 64 bits, not {self.seed}",
            ),
            (
                logprobs is None or 0 <= logprobs <= MAX_LOGPROBS,
                f"logprobs must be between 0 and {MAX_LOGPROBS}, not {logprobs}",
            ),
        )

    def _penalty_checks(self) -> tuple[tuple[bool, str], ...]:
        presence, frequency, repetition = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return (
            (-2 <= presence <= 2, f"presence_penalty must be between -2 and 2, not {presence}"),
            (-2 <= frequency <= 2, f"frequency_penalty must be between -2 and 2, not {frequency}"),
            (
                repetition > 0 and math.isfinite(repetition),
                f"repetition_penalty must be above 0 and finite, not {repetition}",
            ),
        )

    def _token_checks(self) -> tuple[tuple[bool, str], ...]:
        far = [bias for _, bias in self.logit_bias if not abs(bias) <= MAX_BIAS]
        return (
            (all(self.stop), "stop must not hold an empty string"),
            (not far, f"logit_bias must be between -100 and 100 for each token, not {far[:1]}"),
            (self.allowed_token_ids != (), "allowed_token_ids must not be empty: leave it out to allow all"),
            (all(self.bad_words), "bad_words must not hold an empty string"),
            (all(self.bad_token_ids), "bad_token_ids must not hold an empty sequence"),
            (
                self.structure is None or not self._contradicts_structures,
                "ignore_eos, min_tokens, allowed_token_ids and bad_words do not go with a structured answer: leave the "
                "field out, or response_format and structured_outputs",
            ),
        )

    @property
    def _contradicts_structures(self) -> bool:
        is_bound = self.allowed_token_ids is not None or bool(self.bad_words or self.bad_token_ids)
        return is_bound or self.ignore_eos or self.min_tokens > 0

    @property
    def uses_history(self) -> bool:
        """Whether the next token's logits depend on which tokens there were before."""
        return self.penalises or bool(self.bad_token_ids) or self.structure is not None

    @property
    def penalises(self) -> bool:
        """Whether a penalty is not at its neutral value."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def held_back(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that would end the request, if it must not end before ``min_tokens``."""
        if not self.min_tokens:
            return frozenset()
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)))

    def leaves_a_token(self, eos_token_ids: Iterable[int], vocab_size: int) -> bool:
        """Whether ``allowed_token_ids``, or the vocabulary, has one that no other field can exclude."""
        excluded = self.held_back(eos_token_ids) | {word[-1] for word in self.bad_token_ids}
        if self.allowed_token_ids is None:
            return len(excluded) < vocab_size
        return not excluded.issuperset(self.allowed_token_ids)

    @property
    def named_token_ids(self) -> Mapping[str, Sequence[int]]:
        """The token ids in each field that names some."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token_id for word in self.bad_token_ids for token_id in word],
        }

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: at temperature 0, and so near it that nothing else is likely."""
        return self.temperature < GREEDY_BELOW


def _pairs(bias: object) -> tuple[tuple[int, float], ...]:
    """Pairs of a bias that was given as a mapping or as pairs. Keys of JSON objects are texts."""
    pairs: Iterable[tuple[int, float]] = bias.items() if isinstance(bias, Mapping) else bias  # type: ignore[assignment]
    return tuple((int(token_id), value) for token_id, value in pairs)
